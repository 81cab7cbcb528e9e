"""What `doctor --run` makes of what nodes and workers wrote down: each fault on its own line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trnslurm.devices import CPU, CUDA, NEURON, TORCHNEURON
from trnslurm.health.found import Found, read_found
from trnslurm.health.judge import Expected, Line, judge
from trnslurm.records.run import NodeFitness

WORKERS = 4
TRN1 = Expected(
    instance="trn1.32xlarge", device=NEURON, nodes=3, workers_per_node=WORKERS, efa=8,
    network_gbps=800, compile_cache="/fsx/cache",
)  # fmt: skip
P4D = replace(TRN1, instance="p4d.24xlarge", device=CUDA, efa=4, network_gbps=400)
LOCAL = replace(TRN1, instance="local", device=CPU, efa=0, network_gbps=0)
EFA = ("NET/OFI Selected provider is efa, fabric is efa (found 4 nics)", "Using network Libfabric")
NO_PLUGIN = ("NET/Plugin: Could not find: libnccl-net.so", "Using network Socket")


def healthy(expected: Expected) -> dict[str, Any]:
    """What is written where all is well, by node and by rank."""
    nodes = {
        n: {
            "node": n, "host": f"node-{n}", "limits": {"memlock": None, "files": 65536},
            "efa": {"domains": [f"rdmap{d}s27" for d in range(expected.efa)], "said": ""},
            "versions": {"kernel": "6.8.0", "libfabric": "2.1", "aws-neuronx-dkms": "2.24"},
            "preflight": {"exit_code": 0}, "workers": {"exit_code": 0, "late": False},
            "meeting": {"graph": {"problem": None}},
        }
        for n in range(expected.nodes)
    }  # fmt: skip
    rates = {str(n): {"to": 1000.0 + n, "from": 1200.0} for n in range(1, expected.nodes)}
    made = {"graphs": ["/fsx/cache/x"], "files": [], "problem": None, "alone": ""}
    nodes[0]["meeting"] = {"rates": rates, "graph": made}
    workers = {
        r: {
            "rank": r, "node": r // WORKERS, "doing": "", "error": "", "world": expected.workers,
            "ones": float(expected.workers), "rounding": "ab12", "bytes": 256_000_000,
            "took_s": [0.02, 0.01, 0.03], "versions": {"torch": "2.9.1"}, "network": list(EFA),
        }
        for r in range(expected.workers)
    }  # fmt: skip
    return {"nodes": nodes, "workers": workers}


def lines(expected: Expected, seen: dict[str, Any], *fit: NodeFitness) -> list[Line]:
    preflight = fit or tuple(NodeFitness(host=f"node-{n}") for n in range(expected.nodes))
    return judge(expected, Found(**seen, preflight=preflight))


def problems(found: list[Line]) -> dict[str, Line]:
    return {line.check: line for line in found if line.level == "problem"}


@pytest.mark.parametrize("expected", [TRN1, P4D, LOCAL])
def test_all_well(expected: Expected) -> None:
    found = lines(expected, healthy(expected))
    assert {line.level for line in found} == {"ok"}
    assert not any(line.fix for line in found)
    checks = [line.check for line in found]
    assert ("EFA" in checks, "compile cache" in checks, "network" in checks) == {
        TRN1: (True, True, False), P4D: (True, False, True), LOCAL: (False, False, False)
    }[expected]  # fmt: skip


def on_node(number: int, *path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def of(seen: dict[str, Any]) -> dict[str, Any]:
        place = seen["nodes"][number]
        for key in path:
            place = place[key]
        return place

    return of


def each_worker(seen: dict[str, Any], nodes: tuple[int, ...], **values: Any) -> None:
    for worker in seen["workers"].values():
        if worker["node"] in nodes:
            worker.update(values)


FAULTS = {
    "memlock": (
        TRN1, lambda s: on_node(1, "limits")(s).update(memlock=65536),
        "locked memory", "64 KiB (node-1)", "LimitMEMLOCK=infinity",
    ),
    "open files": (
        TRN1, lambda s: on_node(2, "limits")(s).update(files=100),
        "open files", "100 (node-2)", "LimitNOFILE",
    ),
    "no EFA": (
        TRN1, lambda s: on_node(1, "efa")(s).update(domains=[], said="fi_getinfo: -61"),
        "EFA", "0 (fi_getinfo: -61) (node-1)", "security group",
    ),
    "EFA that the profile lacks": (
        replace(P4D, instance="dev", efa=0),
        lambda s: on_node(1, "efa")(s).update(domains=["rdmap0s27", "rdmap1s27"]),
        "EFA", "fi_info -p efa: 2 (node-1)", "--ask-nodes",
    ),
    "versions": (
        TRN1, lambda s: on_node(2, "versions")(s).update(libfabric="1.22"),
        "versions", "libfabric: 2.1 (node-0, node-1), 1.22 (node-2)", "one image",
    ),
    "a driver is missing": (
        TRN1, lambda s: on_node(1, "versions")(s).pop("aws-neuronx-dkms"),
        "versions", "aws-neuronx-dkms: 2.24 (node-0, node-2), missing (node-1)", "one image",
    ),
    "packages": (
        LOCAL, lambda s: each_worker(s, (2,), versions={"torch": "2.8"}),
        "packages", "torch: 2.9.1 (node-0, node-1), 2.8 (node-2)", "one Python",
    ),
    "slow link": (
        replace(TRN1, nodes=4),
        lambda s: on_node(0, "meeting", "rates")(s).update({"3": {"to": 900.0, "from": 10.0}}),
        "links", "10 MB/s (node-3)", "ip -s link",
    ),
    "no link": (
        TRN1, lambda s: on_node(2)(s).update(meeting={"problem": "cannot reach node 0"}),
        "links", "node-2: cannot reach node 0", "firewall",
    ),
    "no compiler": (
        TRN1, lambda s: on_node(0, "meeting", "graph")(s).update(problem="not on PATH"),
        "compile", "node-0: not on PATH", "env check",
    ),
    "cache": (
        TRN1, lambda s: on_node(2, "meeting", "graph")(s).update(problem="x: Permission denied"),
        "compile cache", "x: Permission denied (node-2)", "all nodes mount",
    ),
    "wrong world": (
        TRN1, lambda s: each_worker(s, (0, 1, 2), world=1),
        "world size", "1 according to 12 workers", "NEURON_PJRT_",
    ),
    "wrong sum": (
        TRN1, lambda s: each_worker(s, (0, 1, 2), ones=4.0),
        "all-reduce", "ones add up to 4", "all workers",
    ),
    "slow network": (
        P4D, lambda s: each_worker(s, (1,), took_s=[1.0, 0.9, 0.95]),
        "bandwidth", "256 MB in 900.0 ms, 0.52 GB/s", "EFA",
    ),
    "rounding": (
        TRN1, lambda s: each_worker(s, (2,), rounding="cd34"),
        "rounding", "4 of 12 workers round to different bits (node-2)", "STOCHASTIC_ROUNDING",
    ),
    "no plugin": (
        P4D, lambda s: each_worker(s, (1,), network=list(NO_PLUGIN)),
        "network", "NCCL does not use EFA on node-1: NET/Plugin: Could not find", "aws-ofi-nccl",
    ),
    "a worker died": (
        LOCAL, lambda s: s["workers"][5].update(doing="joining the other workers", error="no way"),
        "workers", "1 of 12 (node-1): joining the other workers: no way", "triage",
    ),
    "a node is silent": (
        LOCAL, lambda s: s["nodes"].pop(1), "nodes",
        "only 2 of 3 nodes reported; node 1", "mounted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_line_that_says_what_to_do(name: str) -> None:
    expected, break_it, check, measured, fix = FAULTS[name]
    seen = healthy(expected)
    break_it(seen)
    found = problems(lines(expected, seen))
    assert found.keys() == {check}
    assert measured in found[check].measured and fix in found[check].fix
    assert found[check].expected


def test_what_the_preflight_found_is_taken_over() -> None:
    fit = [NodeFitness(host="node-0"), NodeFitness(host="node-1", warnings=("odd",))]
    bad = NodeFitness(host="node-2", problems=("its clock is 9.0 s ahead; have chrony running",))
    found = lines(LOCAL, healthy(LOCAL), *fit, bad)
    line = problems(found)["preflight"]
    assert (line.measured, line.fix) == ("node-2: its clock is 9.0 s ahead", "have chrony running")
    assert [li.measured for li in found if li.level == "note"] == ["node-1: odd"]


def test_a_cache_of_each_node_is_said_and_no_problem() -> None:
    seen = healthy(TRN1)
    on_node(0, "meeting", "graph")(seen)["alone"] = "compile_cache is not set"
    found = lines(replace(TRN1, compile_cache=None), seen)
    (note,) = [line for line in found if line.level == "note"]
    assert note.check == "compile cache" and "set compile_cache" in note.fix
    assert not problems(found)


def test_torchneuron_has_a_graph_too_but_not_where_a_stand_in_computes() -> None:
    seen, native = healthy(TRN1), replace(TRN1, device=TORCHNEURON, compile_cache=None)
    said = {line.check: line.measured for line in lines(native, seen)}
    assert said["compile"] == "1 compiled by node-0 into the run directory"
    assert said["compile cache"] == "2 of 2 other nodes found it compiled"
    on_node(0, "meeting", "graph")(seen).update(problem="it left no graph")
    (problem,) = problems(lines(native, seen)).values()
    assert "node-0: it left no graph" in problem.measured and "TorchNeuron's" in problem.fix
    on_node(0, "meeting", "graph")(seen).update(skipped="cpu", problem=None)
    assert not {"compile", "compile cache"} & {line.check for line in lines(native, seen)}


def test_bits_that_are_alike_but_of_another_rounding_are_a_note() -> None:
    seen = healthy(TRN1)
    each_worker(seen, (0, 1, 2), to_nearest=False)
    (note,) = [line for line in lines(TRN1, seen) if line.level != "ok"]
    assert (note.check, note.level) == ("rounding", "note")
    assert "STOCHASTIC_ROUNDING_EN=0" in note.fix


def test_a_runtime_with_known_faults_is_a_note() -> None:
    seen = healthy(TRN1)
    for node, version in enumerate(("2.34.10.0-abc", "2.31.24.0-d", "2.35.30.0")):
        on_node(node, "versions")(seen)["aws-neuronx-runtime-lib"] = version
    (note,) = [line for line in lines(TRN1, seen) if line.check == "runtime"]
    assert note.level == "note" and note.measured.endswith("2.31.24.0-d (node-1)")


def test_stand_ins_are_named_and_their_speed_is_not_judged() -> None:
    seen = healthy(TRN1)
    each_worker(seen, (0, 1, 2), stand_in="cpu", took_s=[9.0])
    found = {line.check: line for line in lines(TRN1, seen)}
    assert found["world size"].measured == "12 (on cpu, a stand-in)"
    assert (found["bandwidth"].level, found["bandwidth"].expected) == ("ok", "")


def test_damaged_files_are_missing_ones(make_run) -> None:
    run = make_run()
    for number, text in enumerate(['{"host": "a\\u001b[2J"}', "{", "[]"]):
        run.checkup_file("node", number).write_text(text)
    run.checkup_file("rank", 0).write_text(json.dumps({"rank": 0, "node": 0, "error": "x"}))
    found = read_found(run, TRN1.nodes, TRN1.workers)
    assert list(found.nodes) == [0] and "\x1b" not in found.nodes[0]["host"]
    assert {"nodes", "workers", "preflight"} <= problems(judge(TRN1, found)).keys()
