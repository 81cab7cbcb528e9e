"""Judges the results of a checkup, line by line: measured, expected, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from statistics import median
from typing import Any, Literal

from trnslurm.config.catalog import ON_GPUS, WITH_EFA
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import JobSpec
from trnslurm.rundir import read_json
from trnslurm.runs.foreign import cleaned
from trnslurm.runs.run import NodeFitness, RunDir

Level = Literal["ok", "note", "problem"]
_SLOW = 0.25
"""A link with less than this share of the nodes' median rate is slow."""
_FLOOR = 1 / 20
"""Below this share of the line rate of all EFA interfaces, traffic most likely avoids EFA."""
_FILES = 256
_ROUNDS = (
    "on Neuron: this job's script has NEURON_RT_STOCHASTIC_ROUNDING_EN=0, look for it in the "
    "profile's activate and env; else compare the versions of the nodes"
)
_MOST_NAMED = 6


class Line(Frozen):
    """The result of one check."""

    check: str
    level: Level
    measured: str
    expected: str = ""
    fix: str = ""


class Expected(Frozen):
    """The setup that the job needs, and what its instance type has."""

    instance: str
    device: str
    nodes: int
    workers_per_node: int
    efa: int
    """EFA interfaces that the job's collectives use; 0 without EFA."""
    network_gbps: int
    compile_cache: str | None

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


class Found(Frozen):
    """The results that nodes and workers wrote."""

    nodes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    preflight: Sequence[NodeFitness] = ()


def expected_of(spec: JobSpec) -> Expected:
    """Return the setup that a checkup of this job expects."""
    uses_efa = spec.nodes > 1 and spec.device in WITH_EFA
    return Expected(
        instance=spec.instance.name,
        device=spec.device,
        nodes=spec.nodes,
        workers_per_node=spec.batch.workers_per_node,
        efa=spec.instance.efa if uses_efa else 0,
        network_gbps=spec.instance.network_gbps if uses_efa else 0,
        compile_cache=spec.config.cluster.compile_cache,
    )


def read_found(run: RunDir, expected: Expected) -> Found:
    """Return the results in a run directory; a damaged file counts as missing."""

    def read(what: str, count: int) -> dict[int, dict[str, Any]]:
        files = {n: read_json(run.checkup_file(what, n)) for n in range(count)}
        return {n: cleaned(found) for n, found in files.items() if found}

    return Found(
        nodes=read("node", expected.nodes),
        workers=read("rank", expected.workers),
        preflight=run.preflight("train", 1),
    )


def judge(expected: Expected, found: Found) -> list[Line]:
    """Return the results of all checks, in the order in which a job depends on them."""
    return [line for check in _CHECKS for line in check(expected, found)]


def host_of(found: Found, node: int) -> str:
    """Return a node's name."""
    return str(found.nodes.get(node, {}).get("host") or f"node {node}")


def _came(expected: Expected, found: Found) -> Iterator[Line]:
    missing = [n for n in range(expected.nodes) if n not in found.nodes]
    text = f"{len(found.nodes)} of {expected.nodes} nodes"
    if missing:
        fix = "look at the run's logs: the run directory may not be mounted there, or no Python"
        names = ", ".join(f"node {n}" for n in missing)
        yield Line(
            check="nodes",
            level="problem",
            measured=f"{text} reported, not {names}",
            expected="all, into one run directory that all nodes share",
            fix=fix,
        )
    else:
        yield Line(check="nodes", level="ok", measured=f"{text} share the run directory")


def _preflight(expected: Expected, found: Found) -> Iterator[Line]:
    if not found.preflight:
        fix = "look for its error in the run's logs"
        yield Line(check="preflight", level="problem", measured="it wrote no result", fix=fix)
        return
    for node in found.preflight:
        for text in node.problems:
            what, _, fix = text.rpartition("; ")
            measured = f"{node.host}: {what or text}"
            yield Line(check="preflight", level="problem", measured=measured, fix=fix)
        for text in node.warnings:
            yield Line(check="preflight", level="note", measured=f"{node.host}: {text}")
    if not any(node.problems for node in found.preflight):
        skew = max(abs(node.clock_s) for node in found.preflight)
        measured = f"{len(found.preflight)} nodes fit; clocks differ by {skew:.2f} s"
        yield Line(
            check="preflight",
            level="ok",
            measured=f"{measured}; Python and its packages agree",
            expected="under 5 s, one software",
        )


def _memlock(expected: Expected, found: Found) -> Iterator[Line]:
    values = _of_nodes(found, lambda n: n["limits"]["memlock"])
    if not values:
        return
    # Slurm's FAQ (slurm.schedmd.com/faq.html#memlock) and AWS's guide to EFA ask for unlimited.
    needed = "unlimited: EFA registers what it sends" if expected.efa else ""
    low = {node: value for node, value in values.items() if value is not None}
    if low and expected.efa:
        yield Line(
            check="locked memory",
            level="problem",
            measured=_by_value(found, {n: _size(v) for n, v in low.items()}),
            expected=needed,
            fix="LimitMEMLOCK=infinity in slurmd's unit, and PropagateResourceLimitsExcept=MEMLOCK "
            "in slurm.conf: else a job has the limit of the shell that submitted it",
        )
    else:
        shown = {n: "unlimited" if v is None else _size(v) for n, v in values.items()}
        yield Line(
            check="locked memory", level="ok", measured=_by_value(found, shown), expected=needed
        )


def _open_files(expected: Expected, found: Found) -> Iterator[Line]:
    values = _of_nodes(found, lambda n: n["limits"]["files"])
    needed = _FILES + 4 * expected.workers
    low = {node: v for node, v in values.items() if v is not None and v < needed}
    said = {n: "unlimited" if v is None else str(v) for n, v in (low or values).items()}
    if values:
        yield Line(
            check="open files",
            level="problem" if low else "ok",
            measured=_by_value(found, said),
            expected=f"at least {needed} for {expected.workers} workers",
            fix="raise LimitNOFILE of slurmd" if low else "",
        )


def _efa(expected: Expected, found: Found) -> Iterator[Line]:
    if not expected.efa:
        return
    counts = _of_nodes(found, lambda n: (len(n["efa"]["domains"]), str(n["efa"]["said"])))
    few = {n: v for n, v in counts.items() if v[0] < expected.efa}
    said = {n: f"{v[0]}{f' ({v[1]})' if v[1] else ''}" for n, v in (few or counts).items()}
    if counts:
        yield Line(
            check="EFA",
            level="problem" if few else "ok",
            measured=f"fi_info -p efa: {_by_value(found, said)}",
            expected=f"{expected.efa} interfaces on {expected.instance}",
            fix="enable EFA in its compute resource; an image with EFA's installer (libfabric, "
            "modinfo efa); a security group that allows all traffic within itself"
            if few
            else "",
        )


def _versions(expected: Expected, found: Found) -> Iterator[Line]:
    by_node = _of_nodes(found, lambda n: dict(n["versions"]))
    yield from _compare(found, by_node, "versions", "use one image for all nodes of a queue")
    workers: dict[int, dict[str, str]] = {}
    for seen in found.workers.values():
        if isinstance(seen.get("versions"), dict):
            workers.setdefault(int(seen["node"]), {}).update(seen["versions"])
    yield from _compare(found, workers, "packages", "have one Python for all, on a shared disk")


def _compare(
    found: Found, by_node: Mapping[int, Mapping[str, str]], check: str, fix: str
) -> Iterator[Line]:
    names = dict.fromkeys(name for values in by_node.values() for name in values)
    equal = []
    for name in names:
        values = {node: str(v.get(name, "missing")) for node, v in by_node.items()}
        if len(set(values.values())) == 1:
            equal.append(f"{name} {next(iter(values.values()))}")
            continue
        yield Line(
            check=check,
            level="problem",
            measured=f"{name}: {_by_value(found, values)}",
            expected="the same on all nodes",
            fix=fix,
        )
    if equal:
        alike = "the same on all nodes" if len(by_node) > 1 else ""
        yield Line(check=check, level="ok", measured=", ".join(equal), expected=alike)


def _links(expected: Expected, found: Found) -> Iterator[Line]:
    meeting = found.nodes.get(0, {}).get("meeting", {})
    for node, seen in found.nodes.items():
        if problem := seen.get("meeting", {}).get("problem"):
            yield Line(
                check="links",
                level="problem",
                measured=f"{host_of(found, node)}: {problem}",
                expected="every node reaches node 0 on the master port",
                fix="look at its network and firewall, and at NodeAddr in slurm.conf",
            )
    rates = {int(n): min(r["to"], r["from"]) for n, r in (meeting.get("rates") or {}).items()}
    if not rates:
        return
    usual = median(rates.values())
    slow = {n: rate for n, rate in rates.items() if rate < _SLOW * usual}
    measured = "TCP with node 0, one stream: " + _by_value(
        found, {n: f"{rate:,.0f} MB/s" for n, rate in (slow or rates).items()}
    )
    alike = f"about the {usual:,.0f} MB/s of the other nodes" if len(rates) > 1 else ""
    yield Line(
        check="links",
        level="problem" if slow else "ok",
        measured=measured,
        expected=alike,
        fix="look at its interface (ip -s link), or exclude the node: --sbatch=--exclude=NODE"
        if slow
        else "",
    )


def _graph(expected: Expected, found: Found) -> Iterator[Line]:
    if expected.device != "neuron":
        return
    made = found.nodes.get(0, {}).get("meeting", {}).get("graph") or {}
    cache = expected.compile_cache or "/var/tmp of each node"
    if not made or made.get("problem"):
        why = made.get("problem") or "node 0 did not get so far"
        yield Line(
            check="compile",
            level="problem",
            measured=f"{host_of(found, 0)}: {why}",
            expected=f"one small graph compiled into {cache}",
            fix="look for neuron_parallel_compile's error in the run's log; trnslurm env check",
        )
        return
    measured = f"{len(made['graphs'])} compiled by {host_of(found, 0)} into {cache}"
    yield Line(check="compile", level="ok", measured=measured)
    if expected.nodes == 1:
        return
    if made.get("alone"):
        yield Line(
            check="compile cache",
            level="note",
            measured=f"not shared: {made['alone']}",
            expected="one cache on a file system of all nodes, or every node compiles everything",
            fix="set compile_cache in the cluster profile",
        )
        return
    seen = _of_nodes(found, lambda n: str(n["meeting"]["graph"]["problem"] or ""))
    # Another line reports nodes that did not reach node 0.
    met = {n for n, node in found.nodes.items() if n and "problem" not in node.get("meeting", {})}
    others = {n: seen.get(n, "it did not get so far") for n in sorted(met)}
    bad = {n: why for n, why in others.items() if why}
    good = f"found compiled by {len(others) - len(bad)} of {len(others)} other nodes"
    yield Line(
        check="compile cache",
        level="problem" if bad else "ok",
        measured=_by_value(found, bad) if bad else good,
        expected="what one node has compiled, all find in the cache",
        fix="compile_cache must be one directory on a file system that all nodes mount and may read"
        if bad
        else "",
    )


def _world(expected: Expected, found: Found) -> Iterator[Line]:
    workers = found.workers
    errors: dict[str, list[int]] = {}
    for rank in range(expected.workers):
        seen = workers.get(rank)
        if seen is None:
            why = "never started"
        elif seen.get("error") or seen.get("doing"):
            why = f"{seen.get('doing') or 'running'}: {seen.get('error') or 'ended by another'}"
        else:
            continue
        errors.setdefault(why, []).append(rank)
    for why, ranks in errors.items():
        nodes = sorted({rank // expected.workers_per_node for rank in ranks})
        where = ", ".join(host_of(found, n) for n in nodes[:_MOST_NAMED])
        yield Line(
            check="workers",
            level="problem",
            measured=f"{len(ranks)} of {expected.workers} ({where}): {why}",
            expected=f"{expected.workers} workers that finish",
            fix="the first error in the run's logs (trnslurm triage) is the cause",
        )
    worlds = {r: int(w["world"]) for r, w in workers.items() if "world" in w}
    if not worlds:
        return
    wrong = {world for world in worlds.values() if world != expected.workers}
    planned = f"{expected.nodes} x {expected.workers_per_node} = {expected.workers}, as planned"
    if wrong:
        number = sum(world != expected.workers for world in worlds.values())
        yield Line(
            check="world size",
            level="problem",
            measured=f"{', '.join(map(str, sorted(wrong)))} according to {number} workers",
            expected=planned,
            fix="each world would train its own copy: check the versions of torch_xla, "
            "torch_neuronx and libneuronxla, and NEURON_PJRT_* or PJRT_* in activate and env",
        )
    elif len(worlds) == expected.workers:
        on = _device_of(workers)
        measured = f"{expected.workers}{on}"
        yield Line(check="world size", level="ok", measured=measured, expected=planned)


def _device_of(workers: Mapping[int, Mapping[str, Any]]) -> str:
    stand_ins = {str(w["stand_in"]) for w in workers.values() if w.get("stand_in")}
    return f" (on {', '.join(sorted(stand_ins))}, a stand-in)" if stand_ins else ""


def _sum(expected: Expected, found: Found) -> Iterator[Line]:
    sums = Counter(float(w["ones"]) for w in found.workers.values() if "ones" in w)
    if not sums:
        return
    right = set(sums) == {float(expected.workers)}
    yield Line(
        check="all-reduce",
        level="ok" if right else "problem",
        measured="ones add up to " + ", ".join(f"{s:g}" for s in sorted(sums)),
        expected=str(expected.workers),
        fix="" if right else "collectives do not reach all workers: training would be wrong",
    )


def _bandwidth(expected: Expected, found: Found) -> Iterator[Line]:
    timed = [w for w in found.workers.values() if w.get("took_s")]
    world = expected.workers
    if not timed or world < 2:
        return
    size = int(timed[0]["bytes"])
    # The slowest worker in the best round; each worker sends 2 (W - 1) / W of its bytes:
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    took = min(max(rounds) for rounds in zip(*(w["took_s"] for w in timed), strict=False))
    rate = 2 * (world - 1) / world * size / max(took, 1e-9) / 1e9
    measured = f"{size / 1e6:.0f} MB in {took * 1e3:,.1f} ms, {rate:.2g} GB/s of bus bandwidth"
    line_rate = expected.network_gbps / 8
    if not line_rate or _device_of(found.workers):
        yield Line(check="bandwidth", level="ok", measured=measured)
        return
    slow = rate < _FLOOR * line_rate
    yield Line(
        check="bandwidth",
        level="problem" if slow else "ok",
        measured=measured,
        expected=f"far above {_FLOOR * line_rate:g} GB/s, a twentieth of the line rate of "
        f"{expected.instance} ({expected.network_gbps} Gb/s, AWS)",
        fix="it does not use EFA, or one interface of several: look at the lines EFA and network, "
        "and at the placement group"
        if slow
        else "",
    )


def _rounding(expected: Expected, found: Found) -> Iterator[Line]:
    bits = {r: str(w["rounding"]) for r, w in found.workers.items() if "rounding" in w}
    if not bits:
        return
    usual, number = Counter(bits.values()).most_common(1)[0]
    others = sorted({r // expected.workers_per_node for r, b in bits.items() if b != usual})
    if not others:
        nearest = all(found.workers[rank].get("to_nearest", True) for rank in bits)
        yield Line(
            check="rounding",
            level="ok" if nearest else "note",
            measured=f"the same values have the same bits in bf16 on {len(bits)} workers"
            + ("" if nearest else ", but they are not rounded to the nearest"),
            expected="the same bits, rounded to the nearest",
            fix="" if nearest else _ROUNDS,
        )
        return
    where = ", ".join(host_of(found, n) for n in others[:_MOST_NAMED])
    yield Line(
        check="rounding",
        level="problem",
        measured=f"{len(bits) - number} of {len(bits)} workers round to other bits ({where})",
        expected="the same bits: copies of a parameter must stay equal",
        fix=_ROUNDS,
    )


def _network(expected: Expected, found: Found) -> Iterator[Line]:
    if expected.device not in ON_GPUS or expected.nodes == 1:
        return
    said = {r: "\n".join(w["network"]) for r, w in found.workers.items() if "network" in w}
    if not said:
        return
    if not expected.efa:
        lines = sorted({line for text in said.values() for line in text.splitlines()})
        yield Line(
            check="network", level="ok", measured="; ".join(lines[:3]) or "NCCL logged nothing"
        )
        return
    without = {r: t for r, t in said.items() if not re.search(r"(?i)selected provider is efa", t)}
    if not without:
        measured = f"NCCL uses EFA (aws-ofi-nccl) on {len(said)} workers"
        yield Line(check="network", level="ok", measured=measured, expected="provider efa")
        return
    nodes = sorted({r // expected.workers_per_node for r in without})
    words = next(iter(without.values())).splitlines()
    yield Line(
        check="network",
        level="problem",
        measured=f"NCCL does not use EFA on {', '.join(host_of(found, n) for n in nodes)}: "
        f"{words[0] if words else 'it names no network'}",
        expected=f"aws-ofi-nccl and the provider efa on {expected.instance}",
        fix="install aws-ofi-nccl (EFA's installer has it), or name the directory of its "
        "libnccl-net.so in LD_LIBRARY_PATH by the profile's activate",
    )


_CHECKS: tuple[Callable[[Expected, Found], Iterator[Line]], ...] = (
    _came,
    _preflight,
    _memlock,
    _open_files,
    _efa,
    _versions,
    _links,
    _graph,
    _world,
    _sum,
    _bandwidth,
    _network,
    _rounding,
)


def _of_nodes(found: Found, read: Callable[[Any], Any]) -> dict[int, Any]:
    """Return a value for each node; skip nodes where the value is missing or damaged."""
    values = {}
    for node, seen in found.nodes.items():
        try:
            values[node] = read(seen)
        except (LookupError, TypeError, ValueError):
            continue
    return values


def _by_value(found: Found, values: Mapping[int, str]) -> str:
    """Return values with the nodes that have them: `8 (4 nodes), 7 (node-3)`."""
    nodes: dict[str, list[int]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    if len(nodes) == 1 and len(values) == len(found.nodes):
        return next(iter(nodes))
    parts = []
    for value, which in sorted(nodes.items(), key=lambda item: -len(item[1])):
        names = ", ".join(host_of(found, n) for n in which[:_MOST_NAMED])
        more = len(which) - _MOST_NAMED
        parts.append(f"{value} ({names}{f' and {more} more' if more > 0 else ''})")
    return ", ".join(parts)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number >> 10:,} KiB"
