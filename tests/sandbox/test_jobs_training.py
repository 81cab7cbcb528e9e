"""Training of GPT-2 on two nodes, stage by stage; and how runs look long afterwards.

The tests of this file look at the same runs one after the other, in the order of the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

# Compiling is most of the work here, and what is compiled runs for seconds.
QUICK_COMPILER = (
    "env.XLA_FLAGS=--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
TRAINING = ("steps=3", "train.optimizer=sgd", "model.n_layer=1", QUICK_COMPILER)


@dataclass
class Runs:
    """Runs of two clusters. On the second, which has accounting, state files were lost."""

    user: User
    too_long: Run
    on_two: Run
    on_three: Run
    accounted: Run
    killed: Run


@pytest.fixture(scope="module")
def runs(sandbox, new_sandbox, tmp_path_factory):
    """Slurm ends and forgets jobs some time after it could: so all runs begin here."""
    with new_sandbox("--nodes", "2", "--accounting") as accounting:
        ada = User(accounting, tmp_path_factory.mktemp("ada"))
        killed = ada.submit("train.wait=true")
        user = User(sandbox, tmp_path_factory.mktemp("user"))
        too_long = user.submit("train.wait=true", more=("--time", "1"))
        accounted = ada.submit()
        accounted.until("COMPLETED")
        killed.until_there(1)
        accounting.fault("proc", "1", "trnslurm.node.attempt", "KILL")
        on_two, on_three = (user.submit(*TRAINING, nodes=n, recipe="gpt2_zero1") for n in (2, 3))
        yield Runs(user, too_long, on_two, on_three, accounted, killed)
        sandbox.clean()


def test_every_stage_of_training_on_two_nodes(runs: Runs) -> None:
    run = runs.on_two
    run.until("PRECOMPILING")
    hosts = eventually(lambda: run.phase("precompile")["hosts"])
    assert len(set(hosts.split(","))) == 2
    assert run.phase("train")["reason"] == "waiting for the precompile job"
    eventually((run.path / "logs/precompile-1-node1.log").exists)
    eventually(lambda: "precompile: node 1 of 2" in run.logs("--node", "1"))
    waiting = runs.on_three
    eventually(lambda: waiting.status()["reason"] == "precompile: waiting for free nodes")
    assert waiting.state == "PENDING"
    runs.user.trnslurm("cancel", waiting.path)

    run.until("RUNNING")
    assert run.phase("precompile")["state"] == "COMPLETED"
    run.until("COMPLETED")
    first = run.phase("train")["hosts"].split(",")[0]
    assert f"train: node 0 of 2 on {first}, master " in run.logs()
    assert "ranks agree" in run.logs("-n", "1")
    assert "train attempt 1: COMPLETED" in run.logs("--batch")
    assert "step 3/3, loss " in run.shown()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert {line["late_graphs"] for line in lines} == {0}, "compiled by the precompile"


def test_time_limit(runs: Runs) -> None:
    run = runs.too_long
    run.until("TIMEOUT")
    eventually(lambda: not runs.user.sandbox.queue())
    assert runs.user.sandbox.processes_of(run) == []
    assert "TIMEOUT (time limit; it saved no new checkpoint)" in run.shown()
    assert run.facts()[0]["environment"]["TRNSLURM_ATTEMPT"] == "1"


def until_forgotten(run) -> None:
    """Wait until the controller knows nothing of a run any more."""

    def forgotten() -> bool:
        """the controller has forgotten the jobs"""
        jobs = run.user.sandbox.slurm("squeue", "--noheader", "--states=all", "--format=%A").ok
        return not set(jobs.split()) & set(run.jobs.values())

    eventually(forgotten)


def test_runs_that_slurm_has_forgotten(runs: Runs) -> None:
    """Their state files tell; without these, and without accounting, nobody knows."""
    for run, state in ((runs.on_two, "COMPLETED"), (runs.too_long, "TIMEOUT")):
        until_forgotten(run)
        assert run.state == state
        assert f": {state}" in run.shown()
        assert f"train attempt 1: {state}" in run.logs("--batch")
    (runs.on_two.path / "state/train-1.json").unlink()
    assert runs.on_two.state == "LOST"


def test_accounting_knows_what_state_files_do_not(runs: Runs) -> None:
    run = runs.accounted
    file = run.path / "state/train-1.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "RUNNING"}))
    until_forgotten(run)
    assert run.state == "COMPLETED", "as if the disk was full at its end"
    run = runs.killed
    until_forgotten(run)
    assert json.loads((run.path / "state/train-1.json").read_text())["state"] == "RUNNING"
    assert run.state == "FAILED", run.story()
