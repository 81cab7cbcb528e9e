"""Rows in which a worker dies or stands still."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ..waiting import eventually
from . import invariants
from .trainings import INTERVAL, submit

pytestmark = pytest.mark.rest


def step_of(checkpoint: Path) -> int:
    """The step in a name such as step-00000020.tmp-1."""
    return int(checkpoint.name.partition("-")[2].partition(".")[0])


@pytest.mark.row(1, "SIGKILL of one worker")
def test_kill_one_rank(user, control, row) -> None:
    """The last checkpoint is whole by then: a save under way would be lost too."""
    run = submit(user)
    run.reach(25)
    run.order("pace", 5)
    eventually(
        lambda: any(
            max(run.steps(1)) - saved < INTERVAL for saved in invariants.whole_checkpoints(run.path)
        )
    )

    def kill() -> None:
        run.kill(1)
        run.order("pace", 0.1)

    recovery = run.recover(kill)
    run.finish()
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.row(2, "SIGKILL of worker 0 between writing the shards and the manifest")
def test_kill_between_shards_and_manifest(user, control, row) -> None:
    """Training goes on beside a save: up to two intervals lie behind the checkpoint before."""
    run = submit(user)
    run.reach(15)
    run.order("hold", "manifest 1")
    run.held("manifest")
    (half,) = run.path.glob("checkpoints/*.tmp-1")
    assert list(half.glob("rank-*"))
    recovery = run.recover(lambda: run.kill(0))
    run.release()
    run.finish()
    assert min(run.steps(recovery.attempt)) == step_of(half) - INTERVAL + 1
    assert not list(run.path.glob("checkpoints/*.tmp-*"))
    invariants.check(run, control(), row, recovery, lost_at_most=2 * INTERVAL)


@pytest.mark.faults
@pytest.mark.row(3, "SIGKILL while an old checkpoint is being deleted")
def test_kill_during_removal(user, control, row) -> None:
    run = submit(user)
    run.reach(15)
    run.order("hold", "removal 1")
    run.held("removal")
    (half,) = run.path.glob("checkpoints/*.removed-1")
    recovery = run.recover(lambda: run.kill(0))
    run.release()
    run.finish()
    assert not half.exists()
    # The save two intervals later is there: only its log line was not written yet.
    assert min(run.steps(recovery.attempt)) == step_of(half) + 2 * INTERVAL + 1
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(4, "SIGSTOP of a worker, detected by the watchdog")
def test_stop_a_rank(user, control, row) -> None:
    run = submit(user, "train.watchdog=5", "train.watchdog_min_s=4")
    run.reach(25)
    recovery = run.recover(lambda: run.kill(1, "STOP"))
    run.finish()
    stuck = json.loads((run.path / "state/stuck-train-1.json").read_text())
    assert stuck["rank"] == 1, stuck
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(28, "SIGKILL of a worker, with standby workers")
def test_kill_one_rank_later(user, control, row) -> None:
    """A minute after the start they wait."""
    run = submit(user, "train.pause_s=0.7")
    run.reach(25)

    eventually(lambda: run.workers() == 4, said=run.story)
    time.sleep(5)  # they import
    recovery = run.recover(lambda: run.kill(1))
    run.finish()
    assert not list(run.path.glob("logs/standby-*"))
    invariants.check(run, control(), row, recovery, lost_at_most=INTERVAL)


@pytest.mark.faults
@pytest.mark.row(21, "a crash at the same step in every attempt")
def test_crash_loop(user, control, row) -> None:
    """The first crash left a checkpoint; the two after it left nothing new."""
    run = submit(user, "slurm.max_crashes=2")
    run.order("crash", 25)
    run.reach(24)
    run.keep_logs()
    run.until("FAILED", 240)
    assert run.attempts == [1, 2, 3]
    assert "given up after 2 crashes in a row without a new checkpoint" in run.status()["reason"]
    assert "told to crash in step 25" in run.shown()
    assert invariants.a_checkpoint_is_there(run) == 20
    # srun gives the highest code: that of a node which it ended itself, if the other was faster.
    codes = ("1:0", "143:0")
    invariants.check_end(run, control(), row, steps=24, state="FAILED", exit_code=codes)
