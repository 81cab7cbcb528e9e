"""The progress of a long step: a bar on a terminal, a line every few seconds in a log."""

import sys
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

LINE_EVERY_S = 5
BAR_EVERY_S = 0.1
BAR_WIDTH = 24


class Progress:
    """The progress of one step, on stderr; stdout is for the result."""

    def __init__(self, what: str, total: int, *, before: int = 0, unit: str = "bytes") -> None:
        """Start; work from an earlier run, `before`, does not count toward the speed."""
        self._what, self._total, self._before, self._unit = what, total, before, unit
        self._terminal = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def show(self, done: int) -> None:
        """Show how much is done, if it is time to do so."""
        now = time.monotonic()
        if now - self._shown >= (BAR_EVERY_S if self._terminal else LINE_EVERY_S):
            self._shown = now
            self._write(done, now)

    def finish(self) -> None:
        """Show that everything is done."""
        self._write(self._total, time.monotonic())
        if self._terminal:
            sys.stderr.write("\n")

    def _write(self, done: int, now: float) -> None:
        share = done / self._total if self._total else 1.0
        speed = (done - self._before) / max(now - self._start, 1e-9)
        if self._unit == "bytes":
            unit, size = ("GB", 1e9) if self._total > 1e10 else ("MB", 1e6)
            text = (
                f"{done / size:,.2f} of {self._total / size:,.2f} {unit}, {speed / 1e6:,.2f} MB/s"
            )
        else:
            text = f"{done:,} of {self._total:,} {self._unit}"
        if speed > 0 and done < self._total:
            text += f", {_duration((self._total - done) / speed)} left"
        if self._terminal:
            full = int(share * BAR_WIDTH)
            bar = "#" * full + "-" * (BAR_WIDTH - full)
            sys.stderr.write(f"\r{self._what} [{bar}] {share:4.0%} {text}\x1b[K")
        else:
            sys.stderr.write(f"{self._what}: {share:.0%}, {text}\n")
        sys.stderr.flush()


class Piece(Protocol):
    """A part of a step that does not depend on other parts."""

    @property
    def size(self) -> int:
        """The piece's share of the step."""


P = TypeVar("P", bound=Piece)


def in_turn(pieces: list[P], what: str) -> Iterator[P]:
    """Yield pieces in order, and show the progress."""
    progress = Progress(what, sum(piece.size for piece in pieces))
    done = 0
    for piece in pieces:
        yield piece
        done += piece.size
        progress.show(done)
    progress.finish()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
