"""Rows about the job before the training, and about what a failure tells Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..sandbox.jobs import SITE
from ..waiting import eventually
from . import invariants
from .trainings import WORKER, Training

pytestmark = pytest.mark.rest


@pytest.fixture
def prober(user):
    """The same user, with the recipe whose workers only do what they are told."""
    return replace(user, site=SITE)


def submit(user, *sets: str) -> Training:
    run = user.submit(*sets)
    return Training(run.user, run.path, run.jobs)


@pytest.mark.faults
@pytest.mark.row(13, "a precompile fails, and succeeds when it is requeued")
def test_precompile_fails_once(prober, row) -> None:
    """Slurm has dropped the training by then: `resume` brings one training, and only one."""
    run = submit(prober, "precompile=always", "train.wait=true")
    facts = run.until_there(1, phase="precompile")
    node = facts[0]["host"].rpartition("-")[2]
    run.sandbox.fault("proc", node, WORKER, "KILL")
    run.until("FAILED")
    run.keep_logs()
    first = run.jobs["train"]
    eventually(lambda: first not in " ".join(run.sandbox.queue()))
    run.control("requeue", "precompile")
    run.until_there(1, phase="precompile", attempt=2)
    run.go()
    eventually(lambda: not invariants.queued(run))
    assert run.facts() == {}, "the training has not begun"
    prober.trnslurm("resume", str(run.path))
    run.jobs = run.recorded_jobs()
    assert run.jobs["train"] != first
    run.until("COMPLETED")
    assert len(run.attempts) == 1
    invariants.ended_well(run, exit_code=("0:0",))
    invariants.logs_kept(run)
    row.holds("I4 I6")


@pytest.mark.parametrize(
    "reboots",
    [
        pytest.param(
            False, marks=pytest.mark.row(14, "a precompile is requeued while it is running")
        ),
        pytest.param(True, marks=pytest.mark.row(39, "a precompile's node reboots")),
    ],
)
def test_precompile_requeued(prober, row, reboots: bool) -> None:
    run = submit(prober, "precompile=always", "train.wait=true")
    facts = run.until_there(1, phase="precompile")
    run.keep_logs()
    if reboots:
        run.sandbox.fault(facts[0]["host"], "reboot")
    else:
        run.control("requeue", "precompile")
    run.until_there(1, phase="precompile", attempt=2)
    assert run.attempts == [], "the training waits"
    run.go()
    run.until("COMPLETED")
    assert run.attempts == [1]
    invariants.ended_well(run, exit_code=("0:0",))
    invariants.logs_kept(run)
    row.holds("I4 I6")


@pytest.mark.faults
@pytest.mark.row(15, "srun fails, and commands follow it")
def test_failure_reaches_slurm(prober, row) -> None:
    """The job fails with the step's exit code, and what waits for its success never starts."""
    run = submit(prober, "train.fail_phase=train", "train.fail_rank=0", "slurm.max_crashes=1")
    after = f"--dependency=afterok:{run.jobs['train']}"
    options = (after, "--kill-on-invalid-dep=yes", "--output=/dev/null", "--parsable")
    mark = run.path / "started"
    child = run.sandbox.slurm("sbatch", *options, f"--wrap=touch {mark}").ok.strip()
    run.until("FAILED")
    run.keep_logs()
    eventually(lambda: child not in " ".join(run.sandbox.queue()))
    assert not mark.exists()
    invariants.ended_well(run, "FAILED", exit_code=("1:0",))
    invariants.logs_kept(run)
    row.holds("I4 I6")
