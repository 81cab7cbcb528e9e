"""Cancels runs. A running job that trains saves a checkpoint first; all other jobs end at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from trnslurm.contract.files import write_json
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.errors import RunError, SlurmError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import refuse_foreign, refuse_writable, this_user
from trnslurm.records.run import RunDir
from trnslurm.runs.by_hand import refuse_by_hand
from trnslurm.runs.pipeline import runs_behind
from trnslurm.runs.status import RunStatus, is_complete, statuses_of
from trnslurm.schedulers.choice import by_scheduler, scheduler_of
from trnslurm.submission.halving import cancel_rungs, goes_on


class Cancelled(Frozen, kw_only=False):
    """A run that was cancelled."""

    run: RunDir
    saves: bool
    """Whether it saves a checkpoint before it ends."""


def cancel(run: RunDir, *, now: bool = False) -> list[Cancelled]:
    """Cancel every phase of a run, and the runs that wait for it.

    A job that is training on Slurm saves a checkpoint and then ends, unless `now` is set.
    """
    return cancel_all([run], now=now)


def cancel_all(runs: Sequence[RunDir], *, now: bool = False) -> list[Cancelled]:
    """Cancel runs as `cancel` does, using a few commands for all of them."""
    for run in runs:
        refuse_foreign(run.path, "cancel")
        record = run.record()
        scheduler, jobs = scheduler_of(record), " ".join(record.phase_jobs.values())
        end = f"{scheduler.cancels_with} {jobs}" if jobs else "end its script where it runs"
        refuse_by_hand(run, record, end)
        scheduler.refuse_elsewhere(run, record, "cancel it there")
    every = {run: run.record() for each in runs for run in (each, *_behind(each))}
    # Slurm forgets the cancelling of a job that never started; this file also stops new attempts.
    for run, record in every.items():
        if is_complete(run, record) and not goes_on(run):
            continue  # its leftover jobs are cancelled; the run stays completed
        try:
            write_json(run.cancelled_file, {"by": this_user(), "time": utc_time()})
        except OSError:
            pass  # cancel the job even if the disk is full
    saving: set[RunDir] = set()
    try:
        for scheduler, those in by_scheduler([*every.items()]).items():
            saving |= scheduler.cancel(dict(those), now=now)
    except SlurmError:
        for run in every:
            run.cancelled_file.unlink(missing_ok=True)
        raise
    return [Cancelled(run, saves=run in saving) for run in every]


def _behind(run: RunDir) -> list[RunDir]:
    """Return the runs that wait for a run, except damaged ones."""
    found = []
    for other in runs_behind(run):
        with contextlib.suppress(RunError):
            refuse_foreign(other.path, "cancel")
            found.append(other)
    return found


def cancel_unless_ended(
    runs: Sequence[RunDir], *, now: bool = False
) -> tuple[list[RunStatus], list[Cancelled]]:
    """Cancel runs that may still have jobs. Return the other statuses, and the cancelled runs."""
    statuses, broken = statuses_of(runs, leftovers=True)
    if broken:
        raise RunError(f"{broken[0]}{''.join(map(jobs_to_cancel, runs))}")
    # A LOST run may still run, and so may an early phase of a refused run.
    ended = [
        status
        for status in statuses
        if status.final
        and status.state is not State.LOST
        and all(phase.final for phase in status.phases)
        and status.mend != f"trnslurm cancel {status.run}"
    ]
    over = {status.path for status in ended}
    left = [run for run in runs if str(run.path) not in over]
    cancel_rungs(runs)  # before their runs: a rung starts once the one before it has ended
    return ended, cancel_all(left, now=now) if left else []


def jobs_to_cancel(run: RunDir) -> str:
    """Return the command that cancels the jobs of a run whose record cannot be read."""
    try:
        refuse_foreign(run.path, "cancel")
        refuse_writable(run.path)
        scheduler = scheduler_of(None)
        jobs = scheduler.jobs_from(run.path, this_user())
    except (RunError, SlurmError):
        return ""
    return f": {scheduler.cancels_with} {' '.join(jobs)}" if jobs else ""
