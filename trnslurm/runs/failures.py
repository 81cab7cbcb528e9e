"""Why a run failed: which of its attempts is asked, and what triage finds in it."""

from __future__ import annotations

from trnslurm.errors import RunError
from trnslurm.node.triage.finding import Finding, find_cause
from trnslurm.runs.run import Attempt, RunDir
from trnslurm.runs.status import RunStatus

_FAILED = ("FAILED", "NODE_FAIL", "LOST")


def choose_attempt(run: RunDir, *, phase: str | None, attempt: int | None) -> Attempt:
    """Return the attempt that is meant: by default the newest of the last phase that began."""
    record = run.record()
    if phase is not None and phase not in record.phases:
        raise RunError(f"{run.name} has no phase {phase!r}; it has {', '.join(record.phases)}")
    for name in [phase] if phase else reversed(record.phases):
        attempts = run.attempts(name)
        found = [a for a in attempts if attempt in (None, a.attempt)]
        if found:
            return found[-1]
        if attempts:
            raise RunError(f"{run.name} has no attempt {attempt} of {name}, only {len(attempts)}")
    raise RunError(f"{run.name} has not begun: there is no attempt of {phase or 'any phase'} yet")


def why_it_failed(run: RunDir, status: RunStatus) -> Finding | None:
    """Return what triage finds of a run that failed, or that is requeued after a crash."""
    for phase in reversed(status.phases):
        if not phase.attempt:
            continue
        crashed = phase.state == "REQUEUED" and not run.was_stopped(phase.phase, phase.attempt)
        if phase.state in _FAILED or crashed:
            return find_cause(run.path, phase.phase, phase.attempt)
    return None
