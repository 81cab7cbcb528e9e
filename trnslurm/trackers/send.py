"""Sends each step of a run to a tracker once, and follows a run until it ends.

Steps that a later attempt repeats are not sent again, because metrics do not depend on the attempt
and trackers require steps in ascending order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from trnslurm.config.plugins import plugin_named
from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.report.history import History, is_number
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.runs.watch import follow

TRACKERS = ("wandb", "mlflow")
EVERY_S = 5.0
_NO_NUMBERS = ("step", "steps", "time")
_OF_THIS_HOST = ("notify.",)


class Subject(Frozen):
    """What a tracker is told about a run."""

    name: str
    project: str | None
    """The value of --project."""
    recipe: str
    config: Mapping[str, Any]
    """The run's configuration by dotted key."""
    tags: Mapping[str, str]
    """Values to search runs by: recipe, preset, cluster and sweep. Empty ones are left out."""
    nodes: int
    note: str
    sweep: str
    directory: Path


class Tracker(Protocol):
    """One run in a tracker. A plug-in is a function or class that creates one from a Subject."""

    last: int
    """The last step that the tracker has, or 0 if it has none."""

    def log(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Log these steps, which are lines of metrics.jsonl in ascending order."""

    def close(self, state: State) -> str:
        """Record the state of the run, and return where its steps can be seen."""


def send(
    run: RunDir, to: str, project: str | None, *, say: Callable[[str], None], follows: bool = False
) -> None:
    """Send the new steps of a run. With `follows`, continue until the run has ended."""
    history = History(run, run.record(), run_status(run))
    statuses: Iterator[RunStatus] = iter([history.status])
    if follows:
        statuses = follow(run, EVERY_S)
    opened, errors = _door(to)
    with errors():
        tracker = opened(_subject(history, project))
        first = last = int(tracker.last)
    state = history.status.state
    try:
        for status in statuses:
            state = status.state
            steps = [step for step in run.steps() if step["step"] > last]
            if steps and not status.final:  # the newest step may get more metrics
                steps = [step for step in steps if step["step"] < steps[-1]["step"]]
            if steps:
                with errors():
                    tracker.log(steps)
                    tracker.last = last = steps[-1]["step"]
    finally:
        with errors():
            where = tracker.close(state)
    new = f"steps {first + 1} to {last}" if last > first else "no new steps"
    say(f"{run.name}: {new} sent to {where}")


def numbers_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step, for curves."""
    return {k: v for k, v in step.items() if k not in _NO_NUMBERS and is_number(v)}


def remote_name(name: str) -> str:
    """Convert the name of a run to an id that trackers accept."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64]


def _subject(history: History, project: str | None) -> Subject:
    record = history.record
    config = {k: v for k, v in history.config.items() if not k.startswith(_OF_THIS_HOST)}
    tags = {
        "recipe": record.recipe,
        "preset": record.preset or "",
        "cluster": record.cluster,
        "sweep": record.group,
    }
    return Subject(
        name=history.run.name,
        project=project,
        recipe=record.recipe,
        config=config | {"nodes": record.nodes},
        tags={key: tag for key, tag in tags.items() if tag},
        nodes=record.nodes,
        note=record.note or "",
        sweep=record.group or "",
        directory=history.run.path,
    )


Errors = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that turns a tracker's errors into a TrnslurmError."""


def _door(to: str) -> tuple[Callable[[Subject], Tracker], Errors]:
    """Return what opens a run in a tracker. Built-in trackers take precedence over plug-ins."""
    if to not in TRACKERS:
        plugin = plugin_named("tracker", to, "--to", TRACKERS)
        return plugin.load(), plugin.blamed
    try:
        module = import_module(f"trnslurm.trackers.{to}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "trnslurm":
            raise
        raise TrnslurmError(
            f"--to {to} needs a package that is not installed here: run pip install "
            f"'.[{to}]' in a clone of trnslurm"
        ) from None

    @contextmanager
    def errors() -> Iterator[None]:
        try:
            yield
        except module.REFUSALS as error:
            (first, *_) = str(error).strip().splitlines() or [type(error).__name__]
            raise TrnslurmError(f"--to {to}: {first}") from None

    return module.Run, errors
