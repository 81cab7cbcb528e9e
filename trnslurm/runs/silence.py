"""Custom scripts that report no numbers, and what to add to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from trnslurm.contract.states import State
from trnslurm.contract.times import seconds_of
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus

NO_NUMBERS = (
    "its script has reported no numbers, and none were found in its log and files: call "
    "trnslurm.report(step=, loss=) after each step, or give Trainer a RunCallback (docs/scripts.md)"
)
UNTOLD_S = 60.0
"""How long a training gives no sign of progress before `status` says so."""
_UNTOLD = {State.COMPLETED, State.STOPPED, State.TIMEOUT, State.PREEMPTED, State.CANCELLED}


def no_numbers(statuses: Sequence[RunStatus]) -> str:
    """Return which custom scripts reported no step, and what to add to them; empty if all did."""
    silent = [status.run for status in statuses if _lacks_numbers(status)]
    if not silent or len(statuses) == 1:
        return NO_NUMBERS if silent else ""
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return f"{silent[0]}{more}: {NO_NUMBERS}"


def _lacks_numbers(status: RunStatus) -> bool:
    """Check whether a custom script has trained for a while, and never reported a step."""
    if "step" in status.metrics or not RunDir(Path(status.path)).project_file.exists():
        return False
    if status.state in _UNTOLD:
        return bool(status.attempts)
    began = seconds_of(status.phases[-1].started or "") if status.state is State.RUNNING else None
    return began is not None and time.time() - began > UNTOLD_S
