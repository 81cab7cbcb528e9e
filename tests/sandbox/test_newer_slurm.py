"""The way of a job on the Slurm that clusters have now; `make test-slurm` runs all tests on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..waiting import eventually
from .cluster import CHECKOUT
from .jobs import JobSandbox, User

PREFIX = CHECKOUT / ".make/slurm-24.11"


@pytest.fixture(scope="module")
def sandbox(new_sandbox) -> Iterator[JobSandbox]:
    """Two nodes of Debian 13's Slurm."""
    if not PREFIX.exists():
        pytest.skip(f"needs Debian's package mirror: make {PREFIX.relative_to(CHECKOUT)}")
    with new_sandbox("--nodes", "2", "--slurm", PREFIX) as sandbox:
        yield sandbox


def test_all_of_one_prefix(sandbox: JobSandbox) -> None:
    assert sandbox.state()["slurm"] == "24.11.5"
    assert sandbox.slurm("sbatch", "--version").ok == "slurm-wlm 24.11.5\n"
    assert "24.11.5" in sandbox.slurm("scontrol", "show", "node").ok
    names = sandbox.slurm("srun", "--nodes=2", "hostname").ok.split()
    assert sorted(names) == [sandbox.node_name(1), sandbox.node_name(2)]


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
