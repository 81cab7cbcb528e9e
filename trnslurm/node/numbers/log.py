"""Reads steps from the lines of a worker's log, one line at a time.

If lines contradict each other, no further line counts: a step that goes back belongs to an epoch or
to another worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from trnslurm.node.numbers.lines import Line, parse, pieces
from trnslurm.node.numbers.sighting import Sighting

_MOST_STEP = 1 << 53


class LogReader:
    """What the previous lines say about how to read the next one."""

    def __init__(self) -> None:
        self._leader: int | None = None
        """The first worker that names itself in a line with metrics."""
        self._epochs = False
        """Whether the log counts epochs, so that a mere `step` may be a step within an epoch."""
        self._last = -1
        self._records = Records()
        self.contradicts = False

    def feed(self, line: str) -> Iterator[Sighting]:
        """Yield what a complete line says about steps."""
        for piece in pieces(line):
            for seen in self._piece(piece):
                self.contradicts = self.contradicts or seen.step < self._last
                if self.contradicts or seen.step > _MOST_STEP:
                    return
                self._last = seen.step
                yield seen

    def _piece(self, piece: str) -> Iterator[Sighting]:
        seen = parse(piece)
        if seen and seen.numbers and seen.rank is not None:
            if self._leader is None:
                self._leader = seen.rank
            if seen.rank != self._leader:
                return
        yield from self._records.next(seen)
        if seen is None:
            return
        if seen.step is None:
            if seen.numbers:
                self._records.hold(seen)
            else:
                self._epochs = self._epochs or seen.epoch
            return
        self._epochs = self._epochs or seen.epoch
        if seen.numbers and (seen.sure or not self._epochs):
            yield Sighting(seen.step, seen.numbers, seen.steps)


class Records:
    """Finds the steps of records that have none, such as Trainer's: its bar shows the step.

    ProgressCallback in transformers 4.57 writes with tqdm.write, which redraws the bar at once, so
    the bar is the next piece. In a truncated or buffered log, another bar may follow. So a step
    counts only if it and the previous step are both multiples of the interval between them.
    """

    def __init__(self) -> None:
        self._held: Line | None = None
        self._sure: list[tuple[int, Line, int]] = []
        """The records that no bar has followed since the last one, if their steps fit together."""
        self._least = 2
        self._every = 0

    def hold(self, record: Line) -> None:
        """Keep a record until the next piece may reveal its step."""
        self._held = record

    def next(self, seen: Line | None) -> Iterator[Sighting]:
        """Process the next piece; yield the records whose steps are now certain."""
        held, self._held = self._held, None
        if held is None:
            return
        if seen is None or seen.bar is None:  # the log lacks bars
            self._sure, self._every, self._least = [], 0, 4
            return
        at, of = seen.bar
        if self._every:
            if at % self._every == 0:
                yield Sighting(at, held.numbers, of)
            return
        if self._sure and (self._sure[-1][0] >= at or self._sure[-1][2] != of):
            self._sure = []
        self._sure.append((at, held, of))
        if len(self._sure) >= self._least:
            self._every = _interval([step for step, _, _ in self._sure])
            sure, self._sure = self._sure, []
            if self._every:
                yield from (Sighting(step, line.numbers, steps) for step, line, steps in sure)


def _interval(steps: list[int]) -> int:
    """Return n if these are n, 2n and so on, possibly after 1 (logging_first_step); otherwise 0."""
    later = steps[1:] if steps[0] == 1 else steps
    every = later[1] - later[0] if len(later) > 1 else later[0]
    fits = all(b - a == every for a, b in zip(later, later[1:]))
    return every if fits and all(step % every == 0 for step in later) else 0
