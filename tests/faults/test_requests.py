"""Rows in which someone asks for an end: requeue, cancel, the time limit, preemption."""

from __future__ import annotations

import time

import pytest

from ..waiting import eventually
from . import invariants
from .trainings import INTERVAL, submit

pytestmark = pytest.mark.rest


@pytest.mark.row(5, "scontrol requeue")
def test_requeue(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    recovery = run.recover(lambda: run.control("requeue"))
    run.finish()
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(6, "trnslurm cancel, followed by a requeue")
def test_cancel(user, control, row) -> None:
    """It saves and ends, and nothing brings it back."""
    run = submit(user)
    run.reach(25)
    run.keep_logs()
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")
    last = max(run.steps(1))
    assert invariants.a_checkpoint_is_there(run) == last, "what was trained is saved"
    invariants.ended_well(run, "CANCELLED")
    run.sandbox.slurm("scontrol", "requeue", run.jobs["train"])  # may be refused
    time.sleep(15)  # the requeued job would have started
    eventually(lambda: not invariants.queued(run))
    assert max(line["step"] for line in run.lines) == last
    ended = {"steps": last, "state": "CANCELLED", "exit_code": ()}
    invariants.check_end(run, control(), row, **ended, lost=0, bound=0)


@pytest.mark.faults
@pytest.mark.row(6, "scancel")
def test_scancel(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    run.keep_logs()
    run.sandbox.slurm("scancel", run.jobs["train"])
    run.until("CANCELLED")
    last = max(run.steps(1))
    lost = last - invariants.a_checkpoint_is_there(run)
    assert lost <= INTERVAL
    time.sleep(15)
    assert run.attempts == [1] and max(run.steps(1)) == last
    ended = {"steps": last, "state": "CANCELLED", "exit_code": ()}
    invariants.check_end(run, control(), row, **ended, lost=lost, bound=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(7, "time limit, with the early signal")
def test_time_limit(user, control, row) -> None:
    """Slurm sends the signal up to a minute early, and looks once in half a minute."""
    run = submit(user, "train.pause_s=0.5", more=("--time", "2"))
    run.reach(25)
    recovery = run.recover(lambda: None)
    run.finish()
    assert "time limit" in run.said(1)["reason"]
    invariants.check(run, control(), row, recovery, lost_at_most=0, bound_s=180)


@pytest.mark.faults
@pytest.mark.row(8, "preemption with TERM only")
def test_preemption(user, control, row) -> None:
    run = submit(user)
    run.reach(25)
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null")

    recovery = run.recover(lambda: run.sandbox.slurm("sbatch", *urgent, "--wrap=sleep 3").ok)
    run.finish()
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(19, "requeue, with a save that takes longer than the grace time")
def test_slow_save(user, control, row) -> None:
    """KILL comes in the middle of it: the checkpoint before counts, and no half of this one."""
    run = submit(user)
    run.reach(25)
    run.order("hold", "write 1")
    run.held("write")
    recovery = run.recover(lambda: run.control("requeue"))
    run.finish()
    assert not list(run.path.glob("checkpoints/*.tmp-*"))
    invariants.check(run, control(), row, recovery, lost_at_most=2 * INTERVAL)
