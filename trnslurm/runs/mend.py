"""Chooses the command that continues a run, based on its state."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trnslurm.contract.checkpoints import found, has_saved, newest, newest_step, saves_in
from trnslurm.contract.rundir import PREPARE
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import changed_at, utc_time
from trnslurm.records.foreign import printable
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import PhaseStatus

_CAP_KEY = re.compile(r"\((slurm\.max_\w+)[:)]")


def saved_words(run: RunDir) -> str:
    """Return the newest saved step in words, or an empty string if nothing is saved."""
    if step := newest_step(run):
        one = newest(run)
        form = f" ({printable(one.name)})" if one and one.form else ""
        return f"step {step} is saved{form}"
    if run.project_file.exists() and (left := found(run)):
        return f"{printable(str(left))} was saved at {utc_time(left.time)}"
    place = saves_in(run)
    changed = changed_at(place)  # a custom script may not report its steps
    return f"{place.relative_to(run.path)}/ was written at {utc_time(changed)}" if changed else ""


def next_command(
    run: RunDir, record: Record, state: State, ended: str, phases: Sequence[PhaseStatus], ahead: str
) -> str:
    """Return the command that continues a run, or an empty string if there is none.

    `ended` says where a completed run ended early. `ahead` is the command that continues the failed
    run that this run waits for.
    """
    if PREPARE in record.phases:
        return ""  # another submission continues where this run ended
    if state is State.COMPLETED:
        has_more = ended and has_saved(run)
        return f"trnslurm resume {run.name}" if has_more else ""
    if run.cancelled_file.exists() and not record.refused:
        queued = any(phase.state.queued for phase in phases)
        if queued:
            return f"trnslurm cancel {run.name}"
        has_begun = phases[-1].final and phases[-1].attempt
        return f"trnslurm resume {run.name}" if has_begun else ""
    if ahead:
        return ahead
    last = run.newest_attempt(record, record.phases[-1])
    if state.stopped_short and last and last.cause == EndCause.CAP:
        found = _CAP_KEY.search(last.reason)
        return f"trnslurm resume {run.name} --set {found[1]}=MORE" if found else ""
    if state is State.FAILED and last and last.cause == EndCause.ERROR:
        return ""  # a retry would fail again
    if state is State.CANCELLED and last:
        return f"trnslurm resume {run.name}"
    scheduler = scheduler_of(record)
    held = state is State.HELD and any(map(scheduler.holds, phases))
    # Slurm cancelled the job because another run's job failed; no user did.
    dropped = state is State.CANCELLED and not any(p.attempt or p.started for p in phases)
    dropped = dropped and any(p.reason and not scheduler.ended_by_others(p.reason) for p in phases)
    if state.stopped_short or held or dropped:
        return f"trnslurm resume {run.name}"
    return ""
