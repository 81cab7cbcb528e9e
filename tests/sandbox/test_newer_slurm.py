"""The way of a job on the Slurm that clusters have now; `make test-slurm` runs all tests on one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir

from ..waiting import eventually
from .cluster import CHECKOUT
from .jobs import JobSandbox, Run, User

pytestmark = pytest.mark.rest

PREFIX = CHECKOUT / ".make/slurm-24.11"


@pytest.fixture(scope="module")
def sandbox(new_sandbox) -> Iterator[JobSandbox]:
    """Two nodes of Debian 13's Slurm."""
    if not PREFIX.exists():
        pytest.skip(f"needs Debian's package mirror: make {PREFIX.relative_to(CHECKOUT)}")
    with new_sandbox("--nodes", "2", "--slurm", PREFIX) as sandbox:
        yield sandbox


@pytest.mark.first
def test_all_of_one_prefix(sandbox: JobSandbox) -> None:
    assert sandbox.state()["slurm"] == "24.11.5"
    assert sandbox.slurm("sbatch", "--version").ok == "slurm-wlm 24.11.5\n"
    assert "24.11.5" in sandbox.slurm("scontrol", "show", "node").ok
    names = sandbox.slurm("srun", "--nodes=2", "hostname").ok.split()
    assert sorted(names) == [sandbox.node_name(1), sandbox.node_name(2)]


@pytest.mark.first
def test_a_training_waits_for_its_precompile(user: User) -> None:
    run = user.submit("precompile=always", nodes=2)
    run.until("COMPLETED")
    assert [p["state"] for p in run.status()["phases"]] == ["COMPLETED"] * 2


def test_requeued(user: User) -> None:
    run = user.submit("train.wait=true", nodes=2)
    run.until_there(2)
    user.sandbox.slurm("scontrol", "requeue", run.jobs["train"])
    run.until_there(2, attempt=2)
    assert run.job()["Restarts"] == "1"
    run.go()
    run.until("COMPLETED")
    assert run.phase("train")["attempt"] == 2


def submit_sweep(user: User, *words: str) -> list[Run]:
    said = json.loads(user.trnslurm("submit", "probe", *words, "--json"))
    return [Run(user, Path(run["directory"]), run["jobs"]) for run in said]


def test_a_sweep_is_an_array(user: User) -> None:
    sweep = ("--sweep", "train.lr=0.1,0.2,0.3", "--at-most", "2")
    runs = submit_sweep(user, *user.options(1, "precompile=always"), *sweep)
    assert [[*run.jobs] for run in runs] == [["precompile", "train"], ["train"], ["train"]]
    for run in runs:
        run.until("COMPLETED")
    began = [RunDir(run.path).attempts("train")[0].started for run in runs]
    compiled = RunDir(runs[0].path).attempts("precompile")[0].ended or ""
    assert "" < compiled <= min(began)

    first, second, third = submit_sweep(user, *user.options(1, "train.wait=true"), *sweep)
    array = third.jobs["train"].removesuffix("_3")
    first.until_there(1)
    second.until_there(1)
    assert third.phase("train")["reason"] == "waiting for the end of another run of the sweep"
    first.go()
    third.until_there(1)
    assert third.job()["JobId"] == array
    user.sandbox.slurm("scontrol", "requeue", third.jobs["train"])
    third.until_there(1, attempt=2)
    first.until("COMPLETED")
    assert second.phase("train")["attempt"] == 1
    assert user.trnslurm("exec", str(third.path), "--", "printenv", "SLURM_JOB_ID").strip() == array
    user.trnslurm("cancel", first.path.name.removesuffix("-1"), "--now")
    second.until("CANCELLED")
    third.until("CANCELLED")


def test_cancelled_and_resumed(user: User) -> None:
    run = user.submit("train.wait=true", "train.stop=true")
    run.until_there(1)
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")
    eventually(lambda: not user.sandbox.queue())
    user.trnslurm("resume", str(run.path))
    run.until_there(1, attempt=2)
    run.go()
    run.until("COMPLETED")
