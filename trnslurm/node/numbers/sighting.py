"""What a source says about a step, and how sightings become lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from trnslurm.contract.metrics import READ
from trnslurm.node.numbers.names import HELD_OUT

_MOST_NAMES = 64
_OURS = {"attempt", "step", "steps", "time", READ}


class Sighting(NamedTuple):
    """Metrics of one step, as found in one place."""

    step: int
    numbers: Mapping[str, float]
    steps: int | None = None
    """The total number of steps, if the source states it."""
    time: float | None = None


class Steps:
    """Collects one source's sightings by step, and returns each step once, in order."""

    def __init__(self) -> None:
        self._open: dict[int, Sighting] = {}
        self._given: dict[int, set[str]] = {}
        self._changed = False
        self._newest = -1
        self.now = 0.0
        """The time of this look, for sightings without a time."""

    def add(self, seen: Sighting) -> None:
        """Add a sighting. Steps only increase, and the first value seen for a step stays."""
        if seen.step < self._newest and seen.step not in self._open:
            return
        self._newest = max(self._newest, seen.step)
        self._changed = True
        before = self._open.get(seen.step, seen)
        self._open[seen.step] = Sighting(
            seen.step,
            {**seen.numbers, **before.numbers},
            before.steps if seen.steps is None else seen.steps,
            self.now if before.time is None else before.time,
        )

    def clear(self) -> None:
        """Forget what was not returned yet."""
        self._open.clear()

    def take(self, *, end: bool = False) -> list[Sighting]:
        """Return complete steps: all but the newest, or also the newest after a pause."""
        rests, self._changed = not self._changed, False
        newest = max(self._open, default=-1)
        found = []
        for step in sorted(s for s in self._open if end or rests or s < newest):
            seen = self._open.pop(step)
            given = self._given.get(step, set())
            # A step that was returned already gets only evaluation results.
            fresh = {
                n: v
                for n, v in [*seen.numbers.items()][:_MOST_NAMES]
                if not given or (n not in given and n.startswith(HELD_OUT))
            }
            if fresh:
                self._given = {step: given | fresh.keys()}
                found.append(seen._replace(numbers=fresh))
        return found


def line_of(seen: Sighting, attempt: int, read: str) -> dict[str, float | str | None]:
    """Return a line of metrics.jsonl, as trnslurm.report writes it, and where it was read."""
    line: dict[str, float | str | None] = {"attempt": attempt, "step": seen.step}
    if seen.steps is not None:
        line["steps"] = seen.steps
    # JSON has no nan and no infinity.
    own = {n: v for n, v in seen.numbers.items() if n not in _OURS}
    line |= {n: v if math.isfinite(v) else None for n, v in own.items()}
    line["time"] = None if seen.time is None else round(seen.time, 3)
    line[READ] = read
    return line
