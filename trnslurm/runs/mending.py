"""What Slurm does not mend by itself, and the command that does."""

from __future__ import annotations

from collections.abc import Sequence

from trnslurm.plan.data import PREPARE
from trnslurm.runs.phase import PhaseStatus, held_by_slurm
from trnslurm.runs.run import Record, RunDir

_STOPPED_SHORT = {"FAILED", "LOST", "NODE_FAIL", "PREEMPTED", "STOPPED", "TIMEOUT"}
_QUEUED = {"PENDING", "HELD", "REQUEUED"}


def mend_of(
    run: RunDir, record: Record, state: str, phases: Sequence[PhaseStatus], ahead_mend: str
) -> str:
    """Return the command with which a run goes on; empty: it does by itself, or shall not.

    `ahead_mend` is that of a run which this one waits for in vain.
    """
    if PREPARE in record.phases:
        return ""  # submitted again, it goes on where it was
    if run.cancelled_file.exists() and not record.refused:
        queued = any(phase.state in _QUEUED for phase in phases)
        return f"trnslurm cancel {run.name}" if queued else ""
    if ahead_mend:
        return ahead_mend
    held = state == "HELD" and any(map(held_by_slurm, phases))
    # Nobody asked for the end of what Slurm dropped because of another run's job.
    dropped = state == "CANCELLED" and not any(p.attempt or p.started for p in phases)
    dropped = dropped and any(p.reason for p in phases)
    if state in _STOPPED_SHORT or held or dropped:
        return f"trnslurm resume {run.name}"
    return ""
