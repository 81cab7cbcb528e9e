"""The scripts' branch for Trainium, with stand-ins of the Neuron tools: nothing compiles here."""

from __future__ import annotations

import pytest

from .cluster import eventually

# Behaviour of neuron_parallel_compile -> what becomes of the two phases. The last two exit with 0
# though graphs are missing: the documented limitation that the exit code alone decides. Whoever
# makes precompile look at the graphs changes these two lines.
OUTCOMES = {
    "ok": ("COMPLETED", "COMPLETED"),
    "failed-graphs": ("FAILED", "CANCELLED"),
    "no-graphs": ("COMPLETED", "COMPLETED"),
    "exception": ("COMPLETED", "COMPLETED"),
}


@pytest.fixture
def runs(user):
    """One run per behaviour, each on a node of its own, until all have ended."""
    runs, sets = {}, ("device=neuron", "precompile=auto", "workers_per_node=2")
    for number, behaviour in enumerate(OUTCOMES, 1):
        user.sandbox.fault("neuron", str(number), "neuron_parallel_compile", behaviour)
        more = ("--sbatch", f"--nodelist={user.sandbox.node_name(number)}")
        runs[behaviour] = user.submit(*sets, more=more)
    eventually(lambda: not user.sandbox.queue(), 180)
    yield runs
    user.sandbox.fault("neuron", "all", "neuron_parallel_compile", "ok")
    for number in range(1, len(OUTCOMES) + 1):
        user.sandbox.fault("neuron", str(number), "neuron_parallel_compile", "ok")


def test_precompile_decides_by_its_exit_code(runs) -> None:
    found = {name: [p["state"] for p in run.status()["phases"]] for name, run in runs.items()}
    assert found == {name: list(states) for name, states in OUTCOMES.items()}

    assert "Total failed compilations: 2" in runs["failed-graphs"].logs("--phase", "precompile")
    assert "exit code 2 while running" in runs["failed-graphs"].status()["reason"]
    assert runs["failed-graphs"].facts() == {}
    assert "No todo hlos found" in runs["no-graphs"].logs("--phase", "precompile")
    assert "got exception" in runs["exception"].logs("--phase", "precompile")

    # The tool is the outermost command, in the first phase only, in the environment of Neuron jobs.
    first, second = (runs["ok"].facts(phase)[1]["environment"] for phase in ("precompile", "train"))
    assert first["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
    assert "NEURON_EXTRACT_GRAPHS_ONLY" not in second
    assert "Total successful compilations: 4" in runs["ok"].logs("--phase", "precompile")
    assert "PARALLEL_COMPILE" not in runs["ok"].logs("--phase", "train")
    for name in ("NEURON_CC_FLAGS", "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_FUSE_SOFTMAX"):
        assert first[name] == second[name]
    address, port = second["NEURON_RT_ROOT_COMM_ID"].split(":")
    assert address == second["MASTER_ADDR"] and port != second["MASTER_PORT"]
