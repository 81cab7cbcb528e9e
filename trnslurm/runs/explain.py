"""Explains a run from what triage finds: the reason, the fix, and the command to run after it."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from trnslurm.contract.checkpoints import has_saved, saves_in
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import changed_at
from trnslurm.node.triage.mend import SUBMIT, longer, new_submission, short, way_back
from trnslurm.records.run import ByHand, RunDir
from trnslurm.runs.by_hand import start_by_hand
from trnslurm.runs.status import RunStatus
from trnslurm.runs.unreported import unreported
from trnslurm.schedulers.choice import scheduler_of

if TYPE_CHECKING:
    from trnslurm.node.triage.finding import Finding

# The reason of an attempt whose cause nobody knew.
_REFUSED = re.compile(r"unrecognized arguments: (.+)$")
_BARE = re.compile(r"exit code \d+ while running on [\w.,\[\]-]+")
_GIVEN_UP = "given up after"


def why_it_failed(run: RunDir, status: RunStatus) -> Finding | None:
    """Return triage's finding about a run that failed, or that was requeued after a crash."""
    for phase in reversed(status.phases):
        if not phase.attempt:
            continue
        crashed = phase.state is State.REQUEUED and not run.was_stopped(phase.phase, phase.attempt)
        # Nothing reported or saved until the time limit: the workers may never have met.
        still = phase.state is State.TIMEOUT and not (has_saved(run) or run.last_metrics())
        if phase.state.failed or crashed or still:
            from trnslurm.node.triage.diagnosis import diagnose  # its patterns are for this only

            found = diagnose(run.path, phase.phase, phase.attempt, over=phase.state.failed)
            told = found and found.name and found.name != "time-limit"
            return found if told or not still else None
    return None


def explained(run: RunDir, status: RunStatus) -> tuple[RunStatus, Finding | None]:
    """Return a status whose reason and next command include what triage finds, and that finding.

    A node records the cause itself, unless it died first or its logs were still incomplete.
    """
    found = why_it_failed(run, status)
    status = _with_canceller(run, status)
    status = _by_hand(run, _without_loss(run, status, _with_fix(run, status, found)))
    if not found or found.line in status.reason:
        return status, found
    named = found  # for the function below

    def tell(reason: str) -> str:
        untold = (State.LOST, State.NODE_FAIL, State.TIMEOUT)
        if not _BARE.search(reason) and named.brief and status.state in untold:
            return "; ".join(filter(None, [reason, named.brief]))
        return _BARE.sub(lambda _: named.line, reason)

    phases = [
        replace(phase, reason=tell(phase.reason))
        if (phase.phase, phase.attempt) == (found.phase, found.attempt)
        else phase
        for phase in status.phases
    ]
    return replace(status, reason=tell(status.reason), phases=tuple(phases)), found


def _with_canceller(run: RunDir, status: RunStatus) -> RunStatus:
    """Return a status that names the user who ended the run without trnslurm, if that is known."""
    scheduler = scheduler_of(run.record())
    unnamed = scheduler.by_others()
    if status.state is not State.CANCELLED or not status.reason.startswith(unnamed):
        return status
    named = scheduler.by_others(scheduler.canceller([phase.job_id for phase in status.phases]))
    phases = (replace(p, reason=p.reason.replace(unnamed, named)) for p in status.phases)
    reason = status.reason.replace(unnamed, named)
    return replace(status, reason=reason, phases=tuple(phases))


def _with_fix(run: RunDir, status: RunStatus, found: Finding | None) -> RunStatus:
    """Return a status with what to correct, and the command that then continues the run."""
    resume = f"trnslurm resume {run.name}"
    if not (status.mend or resume).startswith(resume) or run.cancelled_file.exists():
        return status
    failed = status.state.failed
    if not (failed or status.mend):
        return status
    from trnslurm.node.triage.causes import cause_of  # many patterns

    record = run.record()
    saved = bool(has_saved(run) or changed_at(saves_in(run)))  # a script may find its own
    known = cause_of([record.refused]) if failed and not found else None
    if (last := run.newest_attempt(record, record.phases[-1])) and last.cause == EndCause.REPEATS:
        fix = "make the script load what it finds in {checkpoints} when it starts"
        fix, mend = new_submission(asdict(record), fix)
    elif status.state is State.TIMEOUT and not (saved or found or status.mend.endswith("=MORE")):
        fix, mend = longer(asdict(record))
    elif found and failed and found.mend == SUBMIT and not found.options and _continues_work(run):
        # A new run would begin at step 0.
        fix, mend = f"{short(found.fix)} (in work/ in the run directory)", resume
    elif found and (failed or status.state is State.TIMEOUT):
        fix, mend = way_back(
            asdict(record),
            found.mend,
            found.fix,
            found.options,
            saved=saved,
            given_up=_GIVEN_UP in status.reason,
            command=status.mend,
        )
    elif known:
        what = known.explain([record.refused])[1]
        fix, mend = way_back(asdict(record), known.mend, what)
    else:
        return status
    refused = _REFUSED.search(found.lines[-1]) if found and found.lines else None
    if refused and mend.endswith(f" {refused[1]}"):  # the same words would fail again
        mend = f"{mend[: -len(refused[1])]}…"
    return replace(status, fix=fix, mend=mend)


def _continues_work(run: RunDir) -> bool:
    """Check whether a custom script can continue from what it saved, using the run's copy of it."""
    return has_saved(run) and run.project_file.exists() and (run.path / "work").is_dir()


def _by_hand(run: RunDir, status: RunStatus) -> RunStatus:
    """Return a status whose command starts a bundle again as it was started, without trnslurm."""
    record = run.record()
    if not isinstance(record, ByHand) or not status.mend.startswith("trnslurm resume"):
        return status
    return replace(status, mend=start_by_hand(run, record))


def _without_loss(run: RunDir, before: RunStatus, status: RunStatus) -> RunStatus:
    """Return a status that does not suggest a resume that may overwrite unknown checkpoints."""
    resume = f"trnslurm resume {run.name}"
    if resume not in (before.mend, status.mend) or not (left := unreported(run)):
        return status
    fix, mend, record = status.fix, status.mend, run.record()
    again = start_by_hand(run, record) if isinstance(record, ByHand) else f"{resume} --force"
    own = f"`{again}` if the script finds {left} itself; otherwise "
    if (left.whole or left.finds) and mend == resume and not isinstance(record, ByHand):
        own += "pass it with the script's own option"
        own += "" if left.option else " (if the script has none, call trnslurm.saved() in it)"
        return replace(status, fix=own, mend=f"{resume} {left.words}")
    if mend == resume:
        fix, mend = new_submission(asdict(record), "")
    own += "pass it to the script, and call trnslurm.saved() in it"
    return replace(status, fix=", then ".join(filter(None, [own, fix])), mend=mend)
