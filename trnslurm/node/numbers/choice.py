"""Decides which source counts, and when to write a line. No I/O; the clock is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trnslurm.node.numbers.sighting import Sighting, Steps

_GRACE_S = 15.0
"""How long the first metrics wait. A script that calls report does so in this time."""

# A file time that is older, or in the future, comes from a wrong clock.
_OLDEST_S = 30 * 86400.0


class Offers(Protocol):
    """A source, with what the choice needs to know about it."""

    read: str
    steps: Steps


class Choice:
    """Chooses one source at a time, and writes each of its steps once.

    Sources are ordered by trust, with the log last. A source replaces a less trusted one when it
    has a loss, or when no source has one. Lines that were written stay. The more trusted source is
    never replaced by a less trusted one.
    """

    def __init__(self, sources: Sequence[Offers]) -> None:
        self._sources = sources
        self._chosen: Offers | None = None
        self._has_loss = False
        self._last = -1
        self._steps: int | None = None
        """The total number of steps, if a source has stated it."""
        self._first_at: float | None = None
        self._waiting: list[tuple[str, Sighting]] = []

    def due(self, now: float, *, end: bool = False) -> list[tuple[str, Sighting]]:
        """Return what must be written now: each sighting with its source."""
        for source in self._sources:
            seen = source.steps.take(end=end)
            if not seen or not self._may(source, seen):
                continue
            for each in seen:
                held_out = "loss" not in each.numbers and each.step == self._last
                if each.step > self._last or (held_out and source is self._chosen):
                    self._last = each.step
                    at = each.time if each.time and 0 <= now - each.time < _OLDEST_S else now
                    self._steps = self._steps if each.steps is None else each.steps
                    steps = self._steps if each.step <= (self._steps or 0) else None
                    self._waiting.append((source.read, each._replace(time=at, steps=steps)))
        if self._waiting and self._first_at is None:
            self._first_at = now
        if not end and (self._first_at is None or now - self._first_at < _GRACE_S):
            return []
        due, self._waiting = self._waiting, []
        return due

    def _may(self, source: Offers, seen: Sequence[Sighting]) -> bool:
        """Check whether a source counts, and choose it if it does now."""
        if source is self._chosen:
            self._has_loss = self._has_loss or any("loss" in each.numbers for each in seen)
            return True
        has_loss = any("loss" in each.numbers for each in seen)
        if self._chosen is not None:
            trusted = self._sources.index(source) < self._sources.index(self._chosen)
            # A source that lags behind would stop the metrics until it has caught up.
            ahead = seen[-1].step >= self._last
            if not ((has_loss and not self._has_loss) or (trusted and has_loss and ahead)):
                return False
        self._chosen, self._has_loss = source, has_loss
        return True
