"""Sends each step of a run to a tracker once, and follows a run until it ends.

Steps that a later attempt repeats are not sent again, because metrics do not depend on the attempt
and trackers require steps in ascending order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from trnslurm.config.plugins import plugin_named
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.report.history import History, is_number
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.runs.tables import count
from trnslurm.runs.watch import follow

TRACKERS = ("wandb", "mlflow")
EVERY_S = 5.0
LATE = "late"
"""A line's metrics of an earlier checkpoint, with its step. Its job has reported them late."""
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
    """One run in a tracker. A plug-in is a function or class that creates one from a Subject.

    If it has a true `takes_late`, its lines may contain LATE, and lines without other metrics may
    repeat the last step.
    """

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
    late = _Late(run, f"{to} {project}") if getattr(tracker, "takes_late", False) else None
    try:
        for status in statuses:
            state = status.state
            steps: Sequence[Mapping[str, Any]]
            steps = [step for step in run.steps() if step["step"] > last]
            if steps and not status.final:  # the newest step may get more metrics
                steps = [step for step in steps if step["step"] < steps[-1]["step"]]
            if late:
                steps = late.added_to(steps, last, final=status.final)
            if steps:
                with errors():
                    tracker.log(steps)
                    tracker.last = last = steps[-1]["step"]
            if late:
                late.keep()
    finally:
        with errors():
            where = tracker.close(state)
    new = f"steps {first + 1} to {last}" if last > first else "no new steps"
    if late and late.checkpoints:
        new += f", with late metrics of {count(len(late.checkpoints), 'checkpoint')},"
    say(f"{run.name}: {new} sent to {where}")


class _Late:
    """The metrics of the jobs that follow a run's checkpoints, and which of them were sent."""

    def __init__(self, run: RunDir, tracker: str) -> None:
        self._run, self._tracker = run, tracker
        self.checkpoints: set[int] = set()
        """The steps of checkpoints whose late metrics were sent."""
        told = read_json(run.sent_late_file).get(tracker)
        known = told if isinstance(told, Mapping) else {}
        self._sent = {int(step): dict(numbers) for step, numbers in known.items()}

    def added_to(
        self, steps: Sequence[Mapping[str, Any]], last: int, *, final: bool
    ) -> list[Mapping[str, Any]]:
        """Return steps, each with the late metrics of at most one checkpoint.

        The other late metrics wait for more steps, or get lines of their own if there will be none.
        """
        late: deque[tuple[int, Mapping[str, float]]] = deque()
        newest = steps[-1]["step"] if steps else last
        for step, numbers in self._run.of_followers().items():
            sent = self._sent.get(step, {})
            changed = {name: n for name, n in numbers.items() if sent.get(name) != n}
            if changed and step <= last:
                late.append((step, changed))
            elif changed and step <= newest:
                self._note(step, changed)
        lines: Iterable[Mapping[str, Any]] = steps
        if final and len(late) > len(steps):
            lines = [*steps, *[{"step": newest}] * (len(late) - len(steps))]
        found = []
        for line in lines:
            if late:
                step, told = late.popleft()
                self._note(step, told)
                self.checkpoints.add(step)
                line = {**line, LATE: {"step": step, **told}}
            found.append(line)
        return found

    def _note(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._sent[step] = {**self._sent.get(step, {}), **numbers}

    def keep(self) -> None:
        """Record what was sent, for the next call."""
        file = self._run.sent_late_file
        if self._sent and read_json(file).get(self._tracker) != self._as_json:
            write_json(file, read_json(file) | {self._tracker: self._as_json})

    @property
    def _as_json(self) -> dict[str, Any]:
        return {str(step): numbers for step, numbers in self._sent.items()}


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
