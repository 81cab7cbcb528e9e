"""Runs that report no metrics, and what to add to a custom script or to wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.states import State
from trnslurm.contract.times import seconds_of
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus
from trnslurm.schedulers.interface import PhaseStatus

NO_NUMBERS = (
    "the script reports no metrics, and trnslurm found none in its log and files: call "
    "trnslurm.report(step=, loss=) after each step, or pass a RunCallback to Trainer "
    "(docs/scripts.md)"
)
UNTOLD_S = 60.0
"""How long a run may show no sign of progress before `status` says so."""
_SLOW_STEPS_S = 600.0
"""How long the first step of a script with a growing log may take, including loading the model."""
_UNTOLD = {State.COMPLETED, State.STOPPED, State.TIMEOUT, State.PREEMPTED, State.CANCELLED}


def no_numbers(statuses: Sequence[RunStatus]) -> str:
    """Return a line about custom scripts that have not reported any steps, or an empty string."""
    silent = [status.run for status in statuses if _lacks_numbers(status)]
    if not silent or len(statuses) == 1:
        return NO_NUMBERS if silent else ""
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return f"{silent[0]}{more}: {NO_NUMBERS}"


def no_steps(status: RunStatus) -> str:
    """Return a line about a run without any steps: what to wait for, or what to do."""
    if _lacks_numbers(status):
        return f"{status.run}: {NO_NUMBERS}"
    if not status.final:
        return (
            f"{status.run} is {status.state} and has no metrics yet: they appear within half a "
            "minute of its first step"
        )
    return f"{status.run} has not reported any steps: run trnslurm status {status.run} to see why"


def _lacks_numbers(status: RunStatus) -> bool:
    """Check whether a custom script has trained for a while without ever reporting a step.

    If the script still writes to its log, metrics may follow, because a first step may take
    minutes.
    """
    run = RunDir(Path(status.path))
    if "step" in status.metrics or not run.project_file.exists():
        return False
    if status.state in _UNTOLD:
        return bool(status.attempts)
    last, now = status.phases[-1], time.time()
    began = seconds_of(last.started or "") if status.state is State.RUNNING else None
    if began is None:
        return False
    moves = now - last_output(run, last) < UNTOLD_S
    return now - began > (_SLOW_STEPS_S if moves else UNTOLD_S)


def last_output(run: RunDir, phase: PhaseStatus) -> float:
    """Return when the nodes last wrote to an attempt's logs, or -inf if there are none."""
    times = []
    for log in run.node_logs(phase.phase, phase.attempt).values():
        with suppress(OSError):
            times.append(log.stat().st_mtime)
    return max(times, default=-math.inf)
