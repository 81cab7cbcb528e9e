"""What a source says about a step, and how sightings become the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from trnslurm.contract.metrics import READ
from trnslurm.node.numbers.names import HELD_OUT

_MOST_NAMES = 64
_OURS = {"attempt", "step", "steps", "time", READ}


class Sighting(NamedTuple):
    """Numbers of a step, read in one place."""

    step: int
    numbers: Mapping[str, float]
    steps: int | None = None
    """The number of all steps, if the source surely states it."""
    time: float | None = None
    derived: bool = False
    """Whether `loss` has another name in the source, such as train_loss."""
    leads: bool = False
    """Whether it counts more than what was seen of this step: it is of a lower worker."""
    unfinished: bool = False
    """Whether more about this step may come after a while, and then counts more."""


class Steps:
    """Collects sightings of one source by step; gives each step out once, in order."""

    def __init__(self) -> None:
        self._open: dict[int, Sighting] = {}
        self._given: dict[int, set[str]] = {}
        self._changed = False
        self._newest = -1
        self.now = 0.0
        """The time of this look, for sightings without a time."""
        self.last = -1
        """The last step that was given out."""
        self.rests = False
        """Whether no step has been added since the last time."""

    def add(self, seen: Sighting) -> None:
        """Add a sighting; steps only go on, and a step is not added behind a later one."""
        if seen.step < self.last or (seen.step < self._newest and seen.step not in self._open):
            return
        self._newest = max(self._newest, seen.step)
        if seen.time is None:
            seen = seen._replace(time=self.now)
        self._changed = True
        before = self._open.get(seen.step)
        if before is None or seen.leads:
            self._open[seen.step] = seen._replace(numbers=dict(seen.numbers))
            return
        numbers = dict(before.numbers)
        exact = before.derived and not seen.derived and "loss" in seen.numbers
        for name, value in seen.numbers.items():
            if before.unfinished or name not in numbers or (name == "loss" and exact):
                numbers[name] = value
        if seen.derived and "loss" in before.numbers and not before.derived:
            numbers["loss"] = before.numbers["loss"]
        self._open[seen.step] = Sighting(
            seen.step,
            numbers,
            before.steps if seen.steps is None else seen.steps,
            seen.time if before.unfinished else before.time,
            before.derived and not exact,
            unfinished=before.unfinished and seen.unfinished,
        )

    def take(self, *, end: bool = False) -> list[Sighting]:
        """Return the steps to which nothing more will come: all but the newest, which may rest."""
        self.rests, self._changed = not self._changed, False
        newest = max(self._open, default=-1)
        rests = self.rests and newest in self._open and not self._open[newest].unfinished
        done = sorted(s for s in self._open if end or rests or s < newest)
        found = []
        for step in done:
            seen = self._open.pop(step)
            given = self._given.get(step, set())
            fresh = {n: v for n, v in [*seen.numbers.items()][:_MOST_NAMES] if n not in given}
            # A step that is out already gets only what an evaluation says about it.
            if given:
                fresh = {n: v for n, v in fresh.items() if n.startswith(HELD_OUT)}
            if not fresh:
                continue
            self.last = step
            self._given = {step: given | fresh.keys()}
            found.append(seen._replace(numbers=fresh))
        return found


def line_of(seen: Sighting, attempt: int, read: str) -> dict[str, float | str | None]:
    """Return the line of metrics.jsonl, as trnslurm.report writes it, with where it was read."""
    line: dict[str, float | str | None] = {"attempt": attempt, "step": seen.step}
    if seen.steps is not None:
        line["steps"] = seen.steps
    # JSON has no nan and no infinity.
    own = {n: v for n, v in seen.numbers.items() if n not in _OURS}
    line |= {n: v if math.isfinite(v) else None for n, v in own.items()}
    line["time"] = None if seen.time is None else round(seen.time, 3)
    line[READ] = read
    return line
