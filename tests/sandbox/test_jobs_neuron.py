"""The scripts' branch for Trainium, with stand-ins of the Neuron tools: nothing compiles here."""

from __future__ import annotations

import pytest

from ..waiting import eventually

pytestmark = pytest.mark.rest

# Behaviour of neuron_parallel_compile -> what becomes of the two phases. The last two exit with 0.
OUTCOMES = {
    "ok": ("COMPLETED", "COMPLETED"),
    "failed-graphs": ("FAILED", "CANCELLED"),
    "no-graphs": ("FAILED", "CANCELLED"),
    "exception": ("FAILED", "CANCELLED"),
}


@pytest.fixture
def runs(user):
    """One run per behaviour, each on a node of its own, until all have ended."""
    cache = f"compile_cache={user.home}/cache"
    neuron = ("device=neuron", "precompile=auto", "workers_per_node=2", "slurm.max_crashes=1")
    runs, sets = {}, (*neuron, cache)
    for number, behaviour in enumerate(OUTCOMES, 1):
        user.sandbox.fault("neuron", str(number), "neuron_parallel_compile", behaviour)
        # A key of its own for each, or the first to compile would do it for all.
        more = (
            "--set",
            f"train.say={behaviour}",
            "--sbatch",
            f"--nodelist={user.sandbox.node_name(number)}",
        )
        runs[behaviour] = user.submit(*sets, more=more)
    eventually(lambda: not user.sandbox.queue())
    yield runs
    user.sandbox.fault("neuron", "all", "neuron_parallel_compile", "ok")
    for number in range(1, len(OUTCOMES) + 1):
        user.sandbox.fault("neuron", str(number), "neuron_parallel_compile", "ok")


def test_precompile_is_judged_by_its_graphs(runs, user) -> None:
    found = {name: [p["state"] for p in run.status()["phases"]] for name, run in runs.items()}
    assert found == {name: list(states) for name, states in OUTCOMES.items()}

    said = {name: run.logs("--phase", "precompile") for name, run in runs.items()}
    assert "Total failed compilations: 2" in said["failed-graphs"]
    assert "2 of 4 graphs could not be compiled" in runs["failed-graphs"].status()["reason"]
    assert runs["failed-graphs"].facts() == {}
    assert "found no graphs (No todo hlos found)" in said["no-graphs"]
    assert (
        "a compile process died without reporting its graphs (got exception)" in said["exception"]
    )
    assert "found no graph" in runs["no-graphs"].shown()

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

    # One graph less: training refuses in seconds, says which one, and what mends it.
    run, lost = runs["ok"], user.home / "cache/neuronxcc-0/MODULE_2+standin/model.neff"
    committed = run.logs("--phase", "precompile", "--batch")
    assert f"4 compiled, 4 files, {user.home}/cache/trnslurm/" in committed
    lost.unlink()
    user.shell("sbatch train.sbatch", run.path)
    eventually(lambda: "train attempt 2: FAILED" in run.logs("--batch"))
    assert f"{lost} is missing: run cd {run.path} && sbatch precompile.sbatch" in run.logs()
    assert run.facts(attempt=2) == {}


# What nodes 1 and 3 do at once, while nodes 2 and 4, each in the same job as one of them, compile.
FIRST = {"locked": ("COMPLETED", "COMPLETED"), "failed-graphs": ("FAILED", "CANCELLED")}


def compile_on(user, node: int, behaviour: str) -> None:
    user.sandbox.fault("neuron", str(node), "neuron_parallel_compile", behaviour)


def test_a_node_that_ends_leaves_the_other_its_time_to_compile(user) -> None:
    """Past the time that srun waits for the others, and though its own graphs do not compile."""
    settings = ("device=neuron", "precompile=auto", "workers_per_node=2", "slurm.max_crashes=1")
    runs = {}
    for first, behaviour in zip((1, 3), FIRST, strict=True):
        compile_on(user, first, behaviour)
        compile_on(user, first + 1, "slow")
        nodes = f"--nodelist=compute-dy-trn1-[{first}-{first + 1}]"
        cache = f"compile_cache={user.home}/cache-{first}"
        more = ("--set", f"train.say={behaviour}", "--sbatch", nodes)
        runs[behaviour] = user.submit(*settings, cache, "slurm.srun_wait_s=1", nodes=2, more=more)

    def ended(run, node: int) -> bool:
        return (run.path / f"state/graphs-1-node{node}.json").exists()

    for run in runs.values():
        eventually(lambda run=run: ended(run, 0))

    # A step that begins now, and whose srun is to wait for one second, is over.
    job = runs["locked"].jobs["precompile"]
    said = user.sandbox.slurm(
        "srun", f"--jobid={job}", "--overlap", "--nodes=2", "--ntasks-per-node=1", "--wait=1",
        "bash", "-c", '[ "$SLURM_NODEID" = 0 ] || exec sleep 600',
    )  # fmt: skip
    assert "First task exited 1s ago" in said.err
    assert [run.phase("precompile")["state"] for run in runs.values()] == ["RUNNING"] * 2
    assert not any(ended(run, 1) for run in runs.values())

    for node in (2, 4, 1, 3):
        compile_on(user, node, "ok")
    eventually(lambda: not user.sandbox.queue())
    found = {name: tuple(p["state"] for p in run.status()["phases"]) for name, run in runs.items()}
    assert found == FIRST
    assert "2 of 4 graphs could not be compiled" in runs["failed-graphs"].status()["reason"]
    for first in (1, 3):
        assert len([*user.home.glob(f"cache-{first}/*/*/model.neff")]) == 4


def test_a_precompile_that_hangs_ends_with_stacks(user) -> None:
    """One node has ended before, because its graphs are another's."""
    compile_on(user, 1, "locked")
    compile_on(user, 2, "hang")
    settings = ("device=neuron", "precompile=auto", "workers_per_node=2", "hang_minutes=0.2")
    nodes = ("--sbatch", "--nodelist=compute-dy-trn1-[1-2]")
    run = user.submit(*settings, f"compile_cache={user.home}/cache", nodes=2, more=nodes)
    eventually(lambda: not user.sandbox.queue())
    compile_on(user, 1, "ok")
    compile_on(user, 2, "ok")
    assert [p["state"] for p in run.status()["phases"]] == ["FAILED", "CANCELLED"]
    reason = run.status()["reason"]
    assert "no worker has made any progress for " in reason
    assert "it has no Python stacks; python: state S, hrtimer_nanosleep" in reason
    log = run.logs("--phase", "precompile", "--node", "1")
    assert 'graphs/compile.py", line ' in log, "the stacks of the process that waits for it"


@pytest.mark.faults
def test_a_node_that_reboots_during_a_precompile(user) -> None:
    """Slurm starts the job again, and the training follows; what is compiled stays."""
    for node in (1, 2, 3, 4):
        compile_on(user, node, "slow")
    settings = ("device=neuron", "precompile=auto", "workers_per_node=2", "slurm.max_crashes=1")
    run = user.submit(*settings, f"compile_cache={user.home}/cache", nodes=2)
    log = run.path / "logs/precompile-1-node1.log"
    eventually(lambda: log.exists() and "Compiling" in log.read_text())
    second = run.phase("precompile")["hosts"].partition(",")[2].rpartition("-")[2]
    user.sandbox.fault(second, "reboot")
    eventually(lambda: len([*run.path.glob("state/precompile-*.json")]) == 2)
    for node in (1, 2, 3, 4):
        compile_on(user, node, "ok")
    eventually(lambda: not user.sandbox.queue())
    assert [p["state"] for p in run.status()["phases"]] == ["COMPLETED", "COMPLETED"]
