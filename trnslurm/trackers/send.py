"""Sends each step of a run to a tracker once, and follows a run until it ends.

Steps that a later attempt repeats are not sent again: metrics do not depend on the attempt, and
trackers take steps in ascending order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.report.history import History, is_number
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.runs.watch import follow

TRACKERS = ("wandb", "mlflow")
EVERY_S = 5.0
_NO_NUMBERS = ("step", "steps", "time")
_OF_THIS_HOST = ("notify.",)


class Tracker(Protocol):
    """One run at a tracker."""

    last: int
    """The last step that it has; 0: none."""

    def log(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Log these steps, in ascending order."""

    def close(self, state: State) -> str:
        """Record the state of the run; return where its steps can be seen."""


def send(
    run: RunDir, to: str, project: str | None, *, say: Callable[[str], None], follows: bool = False
) -> None:
    """Send the new steps of a run; with `follows`, until the run has ended."""
    history = History(run, run.record(), run_status(run))
    statuses: Iterator[RunStatus] = iter([history.status])
    if follows:
        statuses = follow(run, EVERY_S)
    with _opened(history, to, project) as tracker:
        first = tracker.last
        state = history.status.state
        try:
            for status in statuses:
                state = status.state
                steps = [step for step in run.steps() if step["step"] > tracker.last]
                if steps and not status.final:  # the newest step may get more metrics
                    steps = [step for step in steps if step["step"] < steps[-1]["step"]]
                if steps:
                    tracker.log(steps)
                    tracker.last = steps[-1]["step"]
        finally:
            where = tracker.close(state)
    new = f"steps {first + 1} to {tracker.last}" if tracker.last > first else "no new step"
    say(f"{run.name}: {new} sent to {where}")


def numbers_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step, for curves."""
    return {k: v for k, v in step.items() if k not in _NO_NUMBERS and is_number(v)}


def about(history: History) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration of a run by dotted keys, and tags for searches."""
    record = history.record
    config = {k: v for k, v in history.config.items() if not k.startswith(_OF_THIS_HOST)}
    tags = {
        "recipe": record.recipe,
        "preset": record.preset or "",
        "cluster": record.cluster,
        "sweep": record.group,
    }
    return config | {"nodes": record.nodes}, {key: tag for key, tag in tags.items() if tag}


def remote_name(name: str) -> str:
    """Return the name of a run as an id that trackers accept."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


@contextmanager
def _opened(history: History, to: str, project: str | None) -> Iterator[Tracker]:
    """Find or make the run at the tracker; turn the tracker's errors into a TrnslurmError."""
    try:
        module = import_module(f"trnslurm.trackers.{to}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "trnslurm":
            raise
        raise TrnslurmError(
            f"--to {to} needs a package that is missing here: pip install 'trnslurm[{to}]'"
        ) from None
    try:
        yield module.Run(history, project)
    except module.REFUSALS as error:
        (first, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise TrnslurmError(f"--to {to}: {first}") from None
