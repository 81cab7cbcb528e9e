"""Reads steps from the lines of a worker's log, one line at a time.

If lines contradict each other, no further line counts: a step that goes back belongs to an epoch or
to another worker. A log without any step may still have a loss per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trnslurm.node.numbers.epochs import EpochReader
from trnslurm.node.numbers.lines import Line, parse, pieces, rank_of
from trnslurm.node.numbers.sighting import Sighting

_MOST_STEP = 1 << 53
_SURE_CHANGES = 2


class Earlier(NamedTuple):
    """What lines of earlier attempts say about a log that counts epochs."""

    first_epoch: int | None = None
    restarts: bool | None = None
    """Whether the step restarts at each epoch, if known."""


class LogReader:
    """What the previous lines say about how to read the next one."""

    def __init__(self, earlier: Earlier | None = None) -> None:
        """Start with what an earlier attempt's lines say, or None for the first attempt."""
        self._leader: int | None = None
        """The first worker that names itself in a line with metrics."""
        self._epochs = False
        """Whether the log counts epochs. A plain `step` may then restart in each epoch."""
        self._last = -1
        self._records = Records()
        self._batches = Batches()
        self._epoch_steps = EpochSteps(earlier)
        self.epochs = EpochReader(earlier.first_epoch if earlier else None)
        """The loss of each epoch. It counts if the log names no step."""
        self.contradicts = False

    @property
    def names_steps(self) -> bool:
        """Check whether the log has steps, or lines that may turn out to be steps."""
        return self._last >= 0 or self._epoch_steps.undecided

    def feed(self, line: str) -> Iterator[Sighting]:
        """Yield what a complete line says about steps."""
        for piece in pieces(line):
            seen, rank = parse(piece), rank_of(piece)
            if rank is not None and seen and (seen.numbers or seen.epoch is not None):
                self._leader = rank if self._leader is None else self._leader
            if rank is not None and self._leader not in (None, rank):
                continue
            self.epochs.feed(piece)
            for each in self._piece(seen):
                self.contradicts = self.contradicts or each.step < self._last
                if self.contradicts or each.step > _MOST_STEP:
                    return
                self._last = each.step
                yield each

    def _piece(self, seen: Line | None) -> Iterator[Sighting]:
        yield from self._records.next(seen)
        if seen is None:
            return
        if seen.batch:
            yield from self._batches.next(seen)
            return
        if seen.step is None:
            if seen.numbers:
                self._records.hold(seen)
            else:
                self._epochs = self._epochs or seen.epoch is not None
            return
        self._epochs = self._epochs or seen.epoch is not None
        if not seen.numbers:
            return
        self._batches.end()  # the log names its steps
        if seen.sure or not self._epochs:
            yield Sighting(seen.step, seen.numbers, seen.steps)
        elif seen.epoch is not None:
            yield from self._epoch_steps.next(seen)


class EpochSteps:
    """Counts the steps in lines with an epoch over the whole training run.

    If a line states the number of steps in the epoch, its step is a place in the epoch when the
    step restarts at the next epoch. In the first epoch, a place is the step of the run. Without
    that number, steps count the whole run if they keep growing across two changes of the epoch.
    """

    def __init__(self, earlier: Earlier | None) -> None:
        self._fresh = earlier is None
        self._first, self._restarts = earlier or Earlier()
        self._held: list[Line] = []
        self._changes = 0
        self._last = (-1, -1)
        self._contradicts = False

    def next(self, seen: Line) -> Iterator[Sighting]:
        """Process a line with an epoch, a step and metrics. Yield what is now certain."""
        if self._first is None and self._fresh and seen.epoch in (0, 1):
            self._first = seen.epoch
        if seen.steps and self._first is not None:
            yield from self._in_epoch(seen, seen.epoch or 0, seen.step or 0, seen.steps)
            return
        epoch, step = self._last
        self._last = (seen.epoch or 0, seen.step or 0)
        if self._contradicts or self._last[0] < epoch or self._last[1] <= step:
            self._contradicts, self._held = True, []
            return
        self._changes += epoch not in (-1, self._last[0])
        self._held.append(seen)
        if self._changes >= _SURE_CHANGES:
            held, self._held = self._held, []
            yield from (Sighting(line.step or 0, line.numbers, None) for line in held)

    @property
    def undecided(self) -> bool:
        """Check whether lines wait until it is known what their steps count."""
        return bool(self._held)

    def _in_epoch(self, seen: Line, epoch: int, step: int, of: int) -> Iterator[Sighting]:
        before, last = self._last
        self._last = (epoch, step)
        if before not in (-1, epoch) and self._restarts is None:
            self._restarts = step <= last
        goes_back = epoch < before or (step < last and (epoch == before or not self._restarts))
        self._contradicts = self._contradicts or goes_back
        if self._contradicts:
            return
        done = of * (epoch - (self._first or 0)) if self._restarts else 0
        numbers = {**seen.numbers, "epoch": float(epoch)}
        yield Sighting(done + step, numbers, of if self._restarts is False else None)


class Batches:
    """Counts batches over all epochs from bars with a loss, such as Lightning's.

    Until a bar is drawn again, it shows the loss of the previous batch. So the last loss shown
    counts.
    """

    def __init__(self) -> None:
        self._place, self._of, self._before = -1, 0, 0
        self._held: Sighting | None = None
        self._ended = False

    def end(self) -> None:
        """Stop counting."""
        self._ended = True

    def next(self, seen: Line) -> Iterator[Sighting]:
        """Process a bar. Yield the previous batch after the bar has moved."""
        at, of = seen.batch or (0, 0)
        first = self._place < 0
        # An attempt that resumed begins in a later epoch: what was before is not known.
        if self._ended or of != (self._of or of) or (first and (seen.epoch or 0) > 1):
            self._ended = True
            return
        if at < self._place:
            if self._place < of or 2 * at > of:  # of another worker
                return
            self._before, self._place = self._before + of, 0
        elif not first and at - self._place > max(of / 2, 1):  # of another worker
            return
        step = self._before + at
        if self._held and self._held.step != step:
            yield self._held
        self._place, self._of = at, of
        if at:
            self._held = Sighting(step, seen.numbers, None)


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
