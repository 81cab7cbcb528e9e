"""Judges the results of a checkup, line by line: measured, expected, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Literal

from trnslurm.devices import DeviceType
from trnslurm.frozen import Frozen
from trnslurm.health.found import Found
from trnslurm.plan.spec import JobSpec

Level = Literal["ok", "note", "problem"]
_SLOW = 0.25
"""A link with less than this share of the nodes' median rate is slow."""
_FLOOR = 1 / 20
"""Below this share of the line rate of all EFA interfaces, traffic most likely bypasses EFA."""
_FILES = 256
_RUNTIME = "aws-neuronx-runtime-lib"
# "Fixed silent data corruption when the same participant set is reused across NEFFs with different
# orderings", "a 2-node ReduceScatter hang", "a TRN1 DGE copy performance regression of 31-38%"
# (aws-neuron-sdk, release-notes/components/runtime.rst, Neuron 2.32.0).
_MENDED = (2, 34, 10)
_NUMBER = re.compile(r"\d+")


class Line(Frozen, kw_only=False):
    """The result of one check."""

    check: str
    level: Level
    measured: str
    expected: str = ""
    fix: str = ""


class Expected(Frozen):
    """The setup that the job needs, and what its instance type has."""

    instance: str
    device: DeviceType
    nodes: int
    workers_per_node: int
    efa: int
    """EFA interfaces that the job's collectives use; 0 without EFA."""
    network_gbps: int
    compile_cache: str | None

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def nodes_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the nodes on which these workers run."""
        return sorted({rank // self.workers_per_node for rank in ranks})


def expected_of(spec: JobSpec) -> Expected:
    """Return the setup that a checkup of this job expects."""
    efa = spec.instance.efa_for(spec.device, spec.nodes)
    between_nodes = spec.nodes > 1 and spec.device.uses_efa
    return Expected(
        instance=spec.instance.name,
        device=spec.device,
        nodes=spec.nodes,
        workers_per_node=spec.batch.workers_per_node,
        efa=efa,
        network_gbps=spec.instance.network_gbps if between_nodes else 0,
        compile_cache=spec.config.cluster.compile_cache,
    )


def judge(expected: Expected, found: Found) -> list[Line]:
    """Return the results of all checks, in the order in which a job depends on them."""
    return [line for check in _CHECKS for line in check(expected, found)]


def _line(check: str, bad: object, measured: str, expected: str, fix: str) -> Line:
    """Return a problem with its fix, or a line that says that everything is fine."""
    return Line(check, "problem" if bad else "ok", measured, expected, fix if bad else "")


def _came(expected: Expected, found: Found) -> Iterator[Line]:
    text = f"{len(found.nodes)} of {expected.nodes} nodes"
    if missing := [f"node {n}" for n in range(expected.nodes) if n not in found.nodes]:
        yield Line(
            "nodes",
            "problem",
            f"only {text} reported; {', '.join(missing)} did not",
            "all nodes, in one run directory that they share",
            "check the run's logs: the run directory may not be mounted, or Python is missing",
        )
    else:
        yield Line("nodes", "ok", f"{text} share the run directory")


def _preflight(expected: Expected, found: Found) -> Iterator[Line]:
    nodes = found.preflight
    for node in nodes:
        for text in node.problems:
            what, _, fix = text.rpartition("; ")
            yield Line("preflight", "problem", f"{node.host}: {what or text}", fix=fix)
        for text in node.warnings:
            yield Line("preflight", "note", f"{node.host}: {text}")
    if not nodes:
        fix = "look for its error in the run's logs"
        yield Line("preflight", "problem", "the preflight did not write a result", fix=fix)
    elif not any(node.problems for node in nodes):
        skew = max(abs(node.clock_s) for node in nodes)
        measured = f"{len(nodes)} nodes are fit; clocks differ by {skew:.2f} s"
        same = f"{measured}; Python and its packages agree"
        yield Line("preflight", "ok", same, "under 5 s, the same software")


def _memlock(expected: Expected, found: Found) -> Iterator[Line]:
    values = found.of_nodes(lambda n: n["limits"]["memlock"])
    low = {node: v for node, v in values.items() if v is not None} if expected.efa else {}
    shown = {n: "unlimited" if v is None else _size(v) for n, v in (low or values).items()}
    if values:
        # Slurm's FAQ (slurm.schedmd.com/faq.html#memlock) and AWS's EFA guide require unlimited.
        yield _line(
            "locked memory",
            low,
            found.by_value(shown),
            "unlimited: EFA registers the memory that it sends" if expected.efa else "",
            "set LimitMEMLOCK=infinity in slurmd's unit, and PropagateResourceLimitsExcept=MEMLOCK "
            "in slurm.conf. Otherwise a job has the limit of the shell that submitted it",
        )


def _open_files(expected: Expected, found: Found) -> Iterator[Line]:
    values = found.of_nodes(lambda n: n["limits"]["files"])
    needed = _FILES + 4 * expected.workers
    low = {node: v for node, v in values.items() if v is not None and v < needed}
    shown = {n: "unlimited" if v is None else str(v) for n, v in (low or values).items()}
    if values:
        wanted = f"at least {needed} for {expected.workers} workers"
        fix = "raise LimitNOFILE in slurmd's unit"
        yield _line("open files", low, found.by_value(shown), wanted, fix)


def _efa(expected: Expected, found: Found) -> Iterator[Line]:
    counts = found.of_nodes(lambda n: (len(n["efa"]["domains"]), str(n["efa"]["said"])))
    few = {n: v for n, v in counts.items() if v[0] < expected.efa}
    shown = {n: f"{v[0]}{f' ({v[1]})' if v[1] else ''}" for n, v in (few or counts).items()}
    if expected.efa and counts:
        yield _line(
            "EFA",
            few,
            f"fi_info -p efa: {found.by_value(shown)}",
            f"{expected.efa} interfaces on {expected.instance}",
            "enable EFA in its compute resource; use an image with EFA's installer (libfabric, "
            "modinfo efa) and a security group that allows all traffic within itself",
        )
    # A profile for nodes whose type Slurm does not know, as on SageMaker HyperPod.
    unused = {node: str(number) for node, (number, _) in counts.items() if number}
    if unused and not expected.efa and expected.nodes > 1 and expected.device.uses_efa:
        yield Line(
            "EFA",
            "problem",
            f"fi_info -p efa: {found.by_value(unused)}",
            f"none: {expected.instance} has no efa in the profile, so jobs do not use them",
            "run trnslurm cluster detect --write --ask-nodes, or set efa in instance_types",
        )


def _versions(expected: Expected, found: Found) -> Iterator[Line]:
    by_node = found.of_nodes(lambda n: dict(n["versions"]))
    yield from _compare(found, by_node, "versions", "use one image for all nodes of a queue")
    workers: dict[int, dict[str, str]] = {}
    for seen in found.workers.values():
        if isinstance(seen.get("versions"), dict):
            workers.setdefault(int(seen["node"]), {}).update(seen["versions"])
    yield from _compare(
        found, workers, "packages", "use one Python environment for all nodes, on a shared disk"
    )


def _runtime(expected: Expected, found: Found) -> Iterator[Line]:
    versions = found.of_nodes(lambda n: str(n["versions"][_RUNTIME]))
    old = {n: v for n, v in versions.items() if tuple(map(int, _NUMBER.findall(v))) < _MENDED}
    if old:
        mended = ".".join(map(str, _MENDED))
        yield Line(
            "runtime",
            "note",
            f"{_RUNTIME} {found.by_value(old)}",
            f"{mended} (SDK 2.32) fixes silent corruption, hangs on 2 nodes, and slow copies on "
            "trn1",
            "install it if your release of torch-neuronx works with it, and compare the losses",
        )


def _compare(
    found: Found, by_node: Mapping[int, Mapping[str, str]], check: str, fix: str
) -> Iterator[Line]:
    same, equal = "the same on all nodes", []
    for name in dict.fromkeys(name for values in by_node.values() for name in values):
        values = {node: str(v.get(name, "missing")) for node, v in by_node.items()}
        if len(set(values.values())) == 1:
            equal.append(f"{name} {next(iter(values.values()))}")
        else:
            yield Line(check, "problem", f"{name}: {found.by_value(values)}", same, fix)
    if equal:
        yield Line(check, "ok", ", ".join(equal), same if len(by_node) > 1 else "")


def _links(expected: Expected, found: Found) -> Iterator[Line]:
    for node, seen in found.nodes.items():
        if problem := seen.get("meeting", {}).get("problem"):
            yield Line(
                "links",
                "problem",
                f"{found.host(node)}: {problem}",
                "every node reaches node 0 on the master port",
                "check its network and firewall, and NodeAddr in slurm.conf",
            )
    timed = found.nodes.get(0, {}).get("meeting", {}).get("rates") or {}
    rates = {int(node): min(rate["to"], rate["from"]) for node, rate in timed.items()}
    if not rates:
        return
    usual = median(rates.values())
    slow = {n: rate for n, rate in rates.items() if rate < _SLOW * usual}
    shown = {n: f"{rate:,.0f} MB/s" for n, rate in (slow or rates).items()}
    yield _line(
        "links",
        slow,
        f"one TCP stream with node 0: {found.by_value(shown)}",
        f"about the {usual:,.0f} MB/s of the other nodes" if len(rates) > 1 else "",
        "check its interface (ip -s link), or exclude the node with --sbatch=--exclude=NODE",
    )


def _graph(expected: Expected, found: Found) -> Iterator[Line]:
    if not expected.device.on_trainium:
        return
    made = found.nodes.get(0, {}).get("meeting", {}).get("graph") or {}
    if made.get("skipped"):
        return
    on_nodes = expected.device.cache_on_nodes
    cache = expected.compile_cache or ("/var/tmp on each node" if on_nodes else "the run directory")
    if not made or made.get("problem"):
        yield Line(
            "compile",
            "problem",
            f"{found.host(0)}: {made.get('problem') or 'node 0 did not get that far'}",
            f"one small graph compiled into {cache}",
            f"look for {expected.device.compiled_by}'s error in the run's log, and run trnslurm "
            "env check",
        )
        return
    compiled = f"{len(made['graphs'])} compiled by {found.host(0)} into {cache}"
    yield Line("compile", "ok", compiled)
    if expected.nodes == 1:
        return
    if made.get("alone"):
        yield Line(
            "compile cache",
            "note",
            f"not shared: {made['alone']}",
            "one cache on a shared file system; otherwise every node compiles everything",
            "set compile_cache in the cluster profile",
        )
        return
    seen = found.of_nodes(lambda n: str(n["meeting"]["graph"]["problem"] or ""))
    # Another line reports nodes that did not reach node 0.
    met = {n for n, node in found.nodes.items() if n and "problem" not in node.get("meeting", {})}
    others = {n: seen.get(n, "it did not get that far") for n in sorted(met)}
    bad = {n: why for n, why in others.items() if why}
    good = f"{len(others) - len(bad)} of {len(others)} other nodes found it compiled"
    yield _line(
        "compile cache",
        bad,
        found.by_value(bad) if bad else good,
        "all nodes find the graph that one node has compiled",
        "set compile_cache to a directory that all nodes mount and can read",
    )


def _workers(expected: Expected, found: Found) -> Iterator[Line]:
    errors: dict[str, list[int]] = {}
    for rank in range(expected.workers):
        seen = found.workers.get(rank)
        if seen is None:
            why = "never started"
        elif seen.get("error") or seen.get("doing"):
            why = (
                f"{seen.get('doing') or 'running'}: "
                f"{seen.get('error') or 'ended because of another worker'}"
            )
        else:
            continue
        errors.setdefault(why, []).append(rank)
    for why, ranks in errors.items():
        where = found.hosts(expected.nodes_of(ranks))
        yield Line(
            "workers",
            "problem",
            f"{len(ranks)} of {expected.workers} ({where}): {why}",
            f"{expected.workers} workers finish",
            "find the cause, which is the first error in the run's logs (trnslurm triage)",
        )


def _world(expected: Expected, found: Found) -> Iterator[Line]:
    worlds = [*map(int, found.of_workers("world").values())]
    wrong = [world for world in worlds if world != expected.workers]
    sizes = ", ".join(map(str, sorted(set(wrong))))
    if wrong or len(worlds) == expected.workers:
        yield _line(
            "world size",
            wrong,
            f"{sizes} according to {len(wrong)} workers"
            if wrong
            else f"{expected.workers}{found.stand_ins}",
            f"{expected.nodes} x {expected.workers_per_node} = {expected.workers}, as planned",
            "each world would train its own copy: check the versions of torch_xla, "
            "torch_neuronx and libneuronxla, and NEURON_PJRT_* or PJRT_* in activate and env",
        )


def _sum(expected: Expected, found: Found) -> Iterator[Line]:
    sums = {*map(float, found.of_workers("ones").values())}
    if sums:
        yield _line(
            "all-reduce",
            sums != {float(expected.workers)},
            "ones add up to " + ", ".join(f"{s:g}" for s in sorted(sums)),
            str(expected.workers),
            "collectives do not reach all workers: training would be wrong",
        )


def _bandwidth(expected: Expected, found: Found) -> Iterator[Line]:
    timed = [w for w in found.workers.values() if w.get("took_s")]
    world = expected.workers
    if not timed or world < 2:
        return
    size = int(timed[0]["bytes"])
    # The slowest worker in the best round. Each worker sends 2 (W - 1) / W of its bytes:
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    took = min(max(rounds) for rounds in zip(*(w["took_s"] for w in timed), strict=False))
    rate = 2 * (world - 1) / world * size / max(took, 1e-9) / 1e9
    measured = f"{size / 1e6:.0f} MB in {took * 1e3:,.1f} ms, {rate:.2g} GB/s bus bandwidth"
    line_rate = expected.network_gbps / 8
    if not line_rate or found.stand_ins:
        yield Line("bandwidth", "ok", measured)
        return
    yield _line(
        "bandwidth",
        rate < _FLOOR * line_rate,
        measured,
        f"far above {_FLOOR * line_rate:g} GB/s, which is 5% of the line rate of "
        f"{expected.instance} ({expected.network_gbps} Gb/s, AWS)",
        "traffic does not use EFA, or only one interface: check the lines EFA and network, "
        "and the placement group",
    )


def _network(expected: Expected, found: Found) -> Iterator[Line]:
    said = {rank: "\n".join(lines) for rank, lines in found.of_workers("network").items()}
    if not expected.device.on_gpus or expected.nodes == 1 or not said:
        return
    if not expected.efa:
        lines = sorted({line for text in said.values() for line in text.splitlines()})
        yield Line("network", "ok", "; ".join(lines[:3]) or "NCCL logged nothing")
        return
    without = {r: t for r, t in said.items() if not re.search(r"(?i)selected provider is efa", t)}
    if not without:
        measured = f"NCCL uses EFA (aws-ofi-nccl) on {len(said)} workers"
        yield Line("network", "ok", measured, "provider efa")
        return
    hosts = ", ".join(map(found.host, expected.nodes_of(without)))
    words = next(iter(without.values())).splitlines()
    yield Line(
        "network",
        "problem",
        f"NCCL does not use EFA on {hosts}: {words[0] if words else 'it does not name a network'}",
        f"aws-ofi-nccl and provider efa on {expected.instance}",
        "install aws-ofi-nccl (included in EFA's installer), or add the directory of its "
        "libnccl-net.so to LD_LIBRARY_PATH in the profile's activate",
    )


def _rounding(expected: Expected, found: Found) -> Iterator[Line]:
    bits = {rank: str(seen) for rank, seen in found.of_workers("rounding").items()}
    if not bits:
        return
    fix = (
        "on Neuron, this job's script sets NEURON_RT_STOCHASTIC_ROUNDING_EN=0: look for it in the "
        "profile's activate and env. Otherwise compare the versions on the nodes"
    )
    usual, number = Counter(bits.values()).most_common(1)[0]
    if others := expected.nodes_of(rank for rank, seen in bits.items() if seen != usual):
        yield Line(
            "rounding",
            "problem",
            f"{len(bits) - number} of {len(bits)} workers round to different bits "
            f"({found.hosts(others)})",
            "the same bits, because copies of a parameter must stay equal",
            fix,
        )
        return
    measured = f"the same values have the same bits in bf16 on {len(bits)} workers"
    wanted = "the same bits, rounded to nearest"
    if all(found.workers[rank].get("to_nearest", True) for rank in bits):
        yield Line("rounding", "ok", measured, wanted)
    else:
        odd = f"{measured}, but they are not rounded to nearest"
        yield Line("rounding", "note", odd, wanted, fix)


_CHECKS: tuple[Callable[[Expected, Found], Iterator[Line]], ...] = (
    _came,
    _preflight,
    _memlock,
    _open_files,
    _efa,
    _versions,
    _runtime,
    _links,
    _graph,
    _workers,
    _world,
    _sum,
    _bandwidth,
    _network,
    _rounding,
)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number >> 10:,} KiB"
