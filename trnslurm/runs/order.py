"""Checks whether a run has seen each sample as often as its order says, over all attempts.

At its start, an attempt records the step of the data with which it begins, the number of samples,
their order, and where the steps of the run and of the data differ (contract: state/order.jsonl).
Steps after the checkpoint from which a later attempt continued do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trnslurm.contract.files import read_json_lines
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir

_MOST_SAMPLES = 200_000_000
_DECIDES = {
    "samples": "the number of samples", "global_batch": "the global batch", "seed": "the seed",
    "shuffle": "shuffle", "drop_last": "drop_last", "mix": "the mix", "data": "the data",
}  # fmt: skip


@dataclass
class Stretch:
    """The part of one attempt that counts."""

    attempt: int
    workers: int
    steps: range
    """The steps of the run."""
    data: list[range]
    """The steps of the data that the attempt has trained on."""


@dataclass
class Order:
    """The samples that a run has seen."""

    run: str
    stretches: list[Stretch]
    samples: int
    """The number of different samples, or 0 for a mix."""
    global_batch: int
    seen: int = 0
    """The number of samples trained on, counting repetitions."""
    epochs: int = 0
    """How many times all samples were seen."""
    repeated: int = 0
    missed: int = 0
    counted: bool = True
    """Whether each sample was counted. If there are too many, only positions were compared."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every sample was seen as often as it should be."""
        return not (self.problems or self.repeated or self.missed)


def check_order(run: RunDir) -> Order:
    """Check whether each sample was seen exactly once in each epoch, and return what was found."""
    begins, parts, differ = _read(run)
    if not begins:
        raise TrnslurmError(
            f"{run.name} has not recorded the order of its samples. Recipes record it, and so do "
            "scripts that use trnslurm.batches or trnslurm.loader and call trnslurm.report "
            "(docs/loader.md)"
        )
    last = run.last_metrics().get("step")
    stretches = list(_stretches(begins, parts, int(last) if isinstance(last, int) else 0))
    if not stretches:
        raise TrnslurmError(f"{run.name} has not reported any steps yet: try again later")
    final = begins[stretches[-1].attempt]
    found = Order(
        run=run.name,
        stretches=stretches,
        samples=int(final.get("samples") or 0),
        global_batch=int(final["global_batch"]),
    )
    found.problems += _changes(stretches, begins)
    found.problems += [
        f"attempt {attempt}: {_some(ranks)} had a different order from worker 0: give all workers "
        "the same samples, global_batch and seed"
        for attempt, ranks in differ.items()
        if any(each.attempt == attempt for each in stretches)
    ]
    if not any(_change(begins[each.attempt], final) for each in stretches):
        found.problems += _jumps(stretches)
        _count(found, final)
    return found


def _read(run: RunDir) -> tuple[dict[int, Any], dict[int, list[Any]], dict[int, list[int]]]:
    """Return how each attempt began, where its steps and data steps diverge, and who differs."""
    begins: dict[int, Any] = {}
    parts: dict[int, list[Any]] = {}
    differ: dict[int, list[int]] = {}
    try:
        lines = list(read_json_lines(run.order_file))
    except FileNotFoundError:
        lines = []
    for line in lines:
        if not all(isinstance(line.get(key), int) for key in ("attempt", "step", "ahead")):
            continue
        attempt = line["attempt"]
        if isinstance(line.get("begin"), int) and _is_order(line):
            begins[attempt] = line
            parts[attempt] = []
        parts.setdefault(attempt, []).append(line)
        if isinstance(line.get("differ"), list):
            differ[attempt] = line["differ"]
    return begins, parts, differ


def _is_order(line: dict[str, Any]) -> bool:
    """Check the fields that define an order, because another user's run may contain anything."""
    size, count, mix = line.get("global_batch"), line.get("samples"), line.get("mix")
    numbers = isinstance(size, int) and size > 0 and isinstance(line.get("seed"), int)
    known = count is None if mix else isinstance(count, int) and count > 0
    return numbers and known and (line.get("joined") is True or "drop_last" in line)


def _stretches(begins: dict[int, Any], parts: dict[int, list[Any]], last: int) -> Iterator[Stretch]:
    """Yield the stretches that count, starting with the oldest attempt."""
    kept: list[Stretch] = []
    end = last
    for attempt in sorted(begins, reverse=True):
        begin = begins[attempt]
        first = begin["begin"] - begin["ahead"]  # steps of the training that were done
        if first < end:
            data = list(_data(parts[attempt], first, end))
            steps = range(first + 1, end + 1)
            kept.append(Stretch(attempt, int(begin.get("workers", 0)), steps, data))
            end = first
    yield from reversed(kept)


def _data(lines: Sequence[Any], first: int, end: int) -> Iterator[range]:
    """Yield the steps of the data for the run's steps after `first`, up to `end`."""
    begins = [first, *(line["step"] - 1 for line in lines[1:])]
    for line, low, high in zip(lines, begins, [*begins[1:], end], strict=True):
        if low < min(high, end):
            yield range(low + 1 + line["ahead"], min(high, end) + 1 + line["ahead"])


def _change(one: Any, other: Any) -> list[str]:
    return [key for key in _DECIDES if one.get(key) != other.get(key)]


def _changes(stretches: Sequence[Stretch], begins: dict[int, Any]) -> Iterator[str]:
    """Yield the ways in which the order itself has changed."""
    for before, after in itertools.pairwise(stretches):
        was, now = begins[before.attempt], begins[after.attempt]
        for key in _change(was, now):
            values = f" from {was.get(key)!r} to {now.get(key)!r}"
            if key in ("mix", "data"):
                values = ""
            yield (
                f"attempt {after.attempt} changed {_DECIDES[key]}{values}, so the order is "
                f"different from step {after.steps.start} on"
            )


def _jumps(stretches: Sequence[Stretch]) -> Iterator[str]:
    """Yield where the steps of the data are not consecutive."""
    done = 0
    for stretch in stretches:
        for steps in stretch.data:
            place = steps.start - stretch.data[0].start + stretch.steps.start
            if steps.start != done + 1:
                how = "repeats" if steps.start <= done else "skips"
                which = _steps(range(*sorted((steps.start, done + 1))))
                yield (
                    f"attempt {stretch.attempt} {how} the data's {which} at step {place} of the "
                    "run: restore the position with loader.load_state_dict or start= when the "
                    "script resumes"
                )
            done = steps.stop - 1


def _count(found: Order, facts: Any) -> None:
    """Count how often each sample was seen, compared with an uninterrupted order."""
    try:
        from trnslurm.samples.replay import positions, times_seen
    except ImportError:
        raise TrnslurmError(
            "computing the order of samples requires numpy, which this Python does not have: run "
            "pip install numpy"
        ) from None
    done = [steps for stretch in found.stretches for steps in stretch.data]
    sizes = [end - first for first, end in (positions(facts, steps) for steps in done)]
    found.seen = sum(sizes)
    last = max(steps.stop for steps in done)
    if not found.samples:
        found.counted = False
        return
    found.epochs = found.seen // found.samples
    found.counted = max(found.seen, found.samples) <= _MOST_SAMPLES
    if found.counted:
        missing = times_seen(facts, [range(1, last)]) - times_seen(facts, done)
        found.missed = int(missing[missing > 0].sum())
        found.repeated = int(-missing[missing < 0].sum())


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    return f"worker{'s' * (len(ranks) > 1)} {shown}"


def _steps(steps: range) -> str:
    if len(steps) == 1:
        return f"step {steps.start}"
    return f"steps {steps.start}-{steps.stop - 1}"
