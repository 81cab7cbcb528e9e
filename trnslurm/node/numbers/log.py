"""Reads steps from the lines of a worker's log, one after the other.

Lines alone do not say enough: a bar counts anew in each epoch, several workers write the same step,
and Trainer prints its records without a step, next to a bar that shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trnslurm.node.numbers.lines import Counter, Line, parse, pieces
from trnslurm.node.numbers.names import HELD_OUT
from trnslurm.node.numbers.sighting import Sighting

_MOST_STEP = 1 << 53


class LogReader:
    """What the lines so far tell about the next one."""

    def __init__(self, first_epoch: int | None = None) -> None:
        """Take the first epoch that the run's first attempt has named, if it is known."""
        self._leader: int | None = None
        self._counts = ""
        """What counts the steps: step, position or epoch; empty until that is known."""
        self.first_epoch = first_epoch
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._before: tuple[int, int | None, int | None] | None = None
        """The counter of the line before, its total, and its epoch."""
        self._rounds = 0
        self._goes_on = False
        """Whether a counter with a total goes on in the next epoch."""
        self._step: int | None = None
        self._heading: Line | None = None
        self._records = Records()

    def feed(self, line: str) -> Iterator[Sighting]:
        """Yield what a whole line says about steps."""
        for piece in pieces(line):
            yield from self._piece(piece)

    def _piece(self, piece: str) -> Iterator[Sighting]:
        seen = parse(piece)
        before = self._leader
        if seen and not self._leads(seen):
            return
        yield from self._records.next(seen)
        if seen is None:
            self._heading = None
            return
        if seen.heads:
            self._heading = seen
        elif seen.counter or seen.bar or seen.in_dict:
            self._heading = None
        elif seen.epoch is None and self._heading:
            head = self._heading
            seen = seen._replace(counter=head.counter, epoch=head.epoch, epochs=head.epochs)
        elif seen.epoch is None and not seen.held_out:
            return  # a line of unknown place
        if seen.in_dict and seen.counter is None and seen.epoch is None:
            self._records.hold(seen)
            return
        step, steps = self._place(seen)
        if step is None or not seen.numbers or step > _MOST_STEP:
            return
        samples = seen.counter is not None and seen.counter.word == "samples"
        yield Sighting(
            step,
            seen.numbers,
            steps,
            derived=seen.derived,
            leads=before is not None and before != self._leader,
            unfinished=samples and not seen.held_out,
        )

    def _leads(self, seen: Line) -> bool:
        """Check whether a line is of the lowest worker that writes numbers."""
        rank = seen.rank or 0
        if not seen.numbers:
            return self._leader is None or rank <= self._leader
        if self._leader is None or rank < self._leader:
            self._leader = rank
        return rank == self._leader

    def _place(self, seen: Line) -> tuple[int | None, int | None]:
        """Return the step of a line, and the number of all steps if that is sure."""
        counter = seen.counter
        if seen.held_out:
            return self._step_of_evaluation(seen), None
        if seen.epoch is not None:
            self._follow_epoch(seen.epoch, seen.epochs)
        if counter is None or counter.word == "samples" or self._is_of_epoch(counter):
            return self._by_epoch(seen), None
        if not seen.numbers:  # a bar without numbers may count anything
            if counter.word == "step" and not seen.bar and not seen.heads:
                self._counts, self._step = "step", max(self._step or 0, counter.at)
            return None, None
        step, steps = self._by_counter(counter)
        if step is not None:
            self._counts = "step"
            self._step = step
        return step, steps

    def _step_of_evaluation(self, seen: Line) -> int | None:
        """Return the step that an evaluation is about: its own, or the last one."""
        counter = seen.counter
        if counter and (counter.of is not None and counter.word != "step"):
            return None  # it counts the evaluation's batches
        if counter and counter.word == "step" and self._counts in ("", "step"):
            if self._step is None or counter.at >= self._step:
                return counter.at
            return None
        if self._counts == "" and seen.epoch is not None and counter is None:
            self._follow_epoch(seen.epoch, seen.epochs)
            return self._by_epoch(seen)
        return self._step

    def _follow_epoch(self, epoch: int, epochs: int | None) -> None:
        if self.first_epoch is None:
            self.first_epoch = min(epoch, 1)
        self._epoch, self._epochs = epoch, epochs or self._epochs

    def _is_of_epoch(self, counter: Counter) -> bool:
        """Check whether a counter without a total surely begins again in each epoch."""
        if counter.of is not None or self._epoch is None or counter.word != "step":
            return False
        passed = self._epoch - (self.first_epoch or 0)
        return counter.at < passed or (
            self._before is not None
            and self._before[2] == self._epoch - 1
            and counter.at < self._before[0]
        )

    def _by_epoch(self, seen: Line) -> int | None:
        """Return the step of a line without a counter: the last, or the epoch if nothing counts."""
        if self._counts == "step":
            # A mean over the epoch is not the loss of its last step.
            numbers = [*seen.numbers]
            seen_only = {n: v for n, v in seen.numbers.items() if n.startswith(HELD_OUT)}
            for name in numbers:
                if name not in seen_only:
                    del seen.numbers[name]
            return self._step if seen_only else None
        if seen.epoch is None or not seen.numbers:
            return None
        self._counts = "epoch"
        self._step = seen.epoch
        return seen.epoch

    def _by_counter(self, counter: Counter) -> tuple[int | None, int | None]:
        """Return the step that a counter means, and the total."""
        at, of, epoch = counter.at, counter.of, self._epoch
        before, self._before = self._before, (at, of, epoch)
        if of is None:
            return at, None
        if at > of:
            return None, None
        if epoch is not None and before and before[2] == epoch - 1:
            # The first line of the next epoch: has the counter begun again?
            self._goes_on = self._goes_on or (before[1] == of and at > before[0])
        if epoch is not None and not self._goes_on:
            base = self.first_epoch or 0
            return (epoch - base) * of + at, self._epochs * of if self._epochs else None
        if epoch is not None or counter.word == "step":
            return at, of
        if before and before[1] == of and at < before[0]:  # the bar of the next epoch
            self._rounds += 1
        return self._rounds * of + at, None


class Records:
    """Finds the steps of records without one, as Trainer prints them: its bar has the step.

    ProgressCallback of transformers 4.57 writes with tqdm.write, which draws the bar again at once,
    so the bar is the next piece. If a log is cut or buffered, another bar may follow. So a step
    counts only if it and the one before are both multiples of the steps between them.
    """

    def __init__(self) -> None:
        self._held: Line | None = None
        self._sure: list[tuple[int, Line, int]] = []
        """The records since the last one that no bar followed, if their steps fit together."""
        self._least = 2
        self._every = 0

    def hold(self, record: Line) -> None:
        """Take a record whose step the next piece may tell."""
        self._held = record

    def next(self, seen: Line | None) -> Iterator[Sighting]:
        """Take the next piece; yield the records whose steps are now sure."""
        held, self._held = self._held, None
        if held is None:
            return
        counter = seen.counter if seen and seen.bar and not seen.held_out else None
        if counter is None or counter.of is None:  # the log lacks bars
            self._sure, self._every, self._least = [], 0, 4
            return
        now = (counter.at, held, counter.of)
        if self._every:
            if counter.at % self._every == 0:
                yield _sighting(*now)
            return
        if held.held_out:
            return
        if self._sure and self._sure[-1][0] >= counter.at:
            self._sure = []
        self._sure.append(now)
        if len(self._sure) >= self._least:
            self._every = _interval([step for step, _, _ in self._sure])
            sure, self._sure = self._sure, []
            if self._every:
                yield from (_sighting(*each) for each in sure)


def _interval(steps: list[int]) -> int:
    """Return n if these are n, 2n and so on, perhaps behind 1 (logging_first_step); else 0."""
    later = steps[1:] if steps[0] == 1 else steps
    every = later[1] - later[0] if len(later) > 1 else later[0]
    fits = all(b - a == every for a, b in pairwise(later))
    return every if fits and all(step % every == 0 for step in later) else 0


def _sighting(step: int, record: Line, steps: int) -> Sighting:
    return Sighting(step, record.numbers, steps, derived=record.derived)
