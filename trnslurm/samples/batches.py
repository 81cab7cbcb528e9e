"""What each step of a training run computes, and which part of it each worker computes.

A step has a global batch of samples, divided into micro-batches, which are dealt out to the workers
like cards. The samples of a step depend only on the seed and the step's number, so the state of a
run's data is one integer: the number of completed steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trnslurm.samples.mixture import Mix
from trnslurm.samples.order import derive_seed, indices_at

# How many samples are ordered at once, because numpy is slow for only a few.
_BLOCK = 1 << 14


_Part = tuple[int, int, float, float, bool]
"""A micro-batch: number in the step, samples, weight, scale, and whether it is the worker's last.
"""

_Run = tuple[list[_Part], NDArray[np.int64], list[tuple[int, int, int, int]]]
"""Consecutive steps of equal size: a worker's micro-batches in each step, where their samples are,
and each step's number, epoch, first position and size. Nearly all steps have the same size."""


class MicroBatch(NamedTuple):
    """Samples that a worker computes together."""

    indices: list[Any]
    """The samples' indices; with a mix, pairs of a source's name and an index."""
    weight: float
    """Its share of the step. Over all workers, a step's weights add up to 1. Padding weighs 0."""
    scale: float
    """The weight times the number of micro-batches in the step on all workers: 1 on average."""
    last: bool
    """Whether it is this worker's last micro-batch of the step."""
    key: tuple[int, int, int]
    """The run's seed, the number of earlier steps, and the micro-batch's number in the step."""

    @property
    def seed(self) -> int:
        """Return a seed for dropout and the like, which does not depend on the worker."""
        return derive_seed(*self.key)


class Step(NamedTuple):
    """One update of the model."""

    number: int
    """Counted from 1. It is also the state to save: the number of steps completed after this one.
    """
    epoch: int
    """Counted from 0. With a mix it is always 0."""
    samples: int
    """How many samples the step has on all workers together."""
    micro_batches: list[MicroBatch]
    """What this worker computes. All workers have the same number of micro-batches."""


class Batches:
    """The steps of a training run, as this worker computes them.

    Iterate over them, starting after step `start`, or index one step: batches[7] is step 7.
    """

    def __init__(
        self,
        samples: int | Mix,
        *,
        global_batch: int | None,
        micro_batch: int | None,
        seed: int,
        epochs: int | None,
        steps: int | None,
        start: int,
        shuffle: bool,
        drop_last: bool,
        rank: int | None,
        world_size: int | None,
        needs_even: bool = False,
    ) -> None:
        mix = samples if isinstance(samples, Mix) else None
        if mix is not None:
            _check(global_batch in (None, mix.global_batch), f"global_batch is {global_batch}, but "
                   f"the mix was made for {mix.global_batch}: omit global_batch")  # fmt: skip
            _check(epochs is None, "a mix has no epochs: pass steps instead")
            _check(shuffle and not drop_last, "a mix is always shuffled and endless: omit shuffle "
                   "and drop_last")  # fmt: skip
            global_batch = mix.global_batch
        count = samples if isinstance(samples, int) else None
        _check(mix is not None or count is not None,
               f"samples is {samples!r}: pass len(dataset), another number, or a mix")  # fmt: skip
        _check(
            global_batch is not None, "global_batch is missing: pass the number of samples per step"
        )
        assert global_batch is not None
        for name, value, least in (
            ("samples", count, 1), ("global_batch", global_batch, 1), ("epochs", epochs, 1),
            ("micro_batch", micro_batch, 1), ("steps", steps, 1), ("start", start, 0),
        ):  # fmt: skip
            _check(
                value is None or value >= least, f"{name} is {value}: it must be {least} or more"
            )
        _check(epochs is None or steps is None, "pass either epochs or steps, not both")
        _check((rank is None) == (world_size is None), "pass rank and world_size together")
        if count is not None and drop_last:
            _check(count >= global_batch, f"drop_last leaves nothing: {count} samples < "
                   f"the global batch of {global_batch}")  # fmt: skip
        self.global_batch = global_batch
        self.start = start
        self.steps_per_epoch: int | None = None
        """None for a mix."""
        if count is not None:
            self.steps_per_epoch = count // global_batch if drop_last else -(-count // global_batch)
        self.steps = steps
        """The total number of steps over all epochs, or None if there is no end."""
        if self.steps_per_epoch is not None and epochs is not None:
            self.steps = epochs * self.steps_per_epoch
        self._count, self._mix = count, mix
        self.seed, self._micro, self._shuffle = seed, micro_batch, shuffle
        self._needs_even = needs_even
        self._drop_last = drop_last
        self.begun: int | None = None
        """The number of steps completed when the first step was requested, or None before that."""
        self.position = start
        """The most recently requested step."""
        self._shares: dict[tuple[int, int, int], tuple[list[_Part], NDArray[np.int64]]] = {}
        self._place = None if rank is None or world_size is None else (rank, world_size)
        _check(self._place is None or 0 <= self._place[0] < self._place[1],
               f"rank is {rank} and world_size is {world_size}: ranks start at 0")  # fmt: skip

    @property
    def rank(self) -> int:
        """This worker's number among the workers that share a step."""
        return self._where()[0]

    @property
    def world_size(self) -> int:
        """How many workers share a step."""
        return self._where()[1]

    @property
    def accumulation(self) -> int:
        """How many micro-batches each worker computes in each step."""
        return 1 if self._micro is None else -(-self._most_units() // self.world_size)

    @property
    def even(self) -> bool:
        """Whether all micro-batches of all steps weigh the same, so that plain means are exact."""
        if self.global_batch % ((self._micro or 1) * self._slots()):
            return False
        if self._count is None or self.steps_per_epoch is None:
            return True
        return self.steps_per_epoch * self.global_batch <= self._count

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps after `start`."""
        return self.between(self.start, self.steps)

    def between(self, done: int, last: int | None) -> Iterator[Step]:
        """Yield the steps after `done`, up to `last`."""
        for numbers in self._blocks(done, last):
            for step in self._steps(numbers):
                self.position = step.number
                yield step

    def rows(self, done: int, last: int) -> Iterator[tuple[list[Any], float]]:
        """Yield the samples and scale of each micro-batch of these steps, without Step objects."""
        for numbers in self._blocks(done, last):
            runs, samples = self._placed(numbers)
            begin = 0
            for parts, _, steps in runs:
                for _ in steps:
                    for part in parts:
                        end = begin + part[1]
                        yield samples[begin:end], part[3]
                        begin = end

    def _blocks(self, done: int, last: int | None) -> Iterator[Sequence[int]]:
        global _used
        _used = _used or self
        self.begun = done if self.begun is None else self.begun
        block = max(1, _BLOCK * self.world_size // self.global_batch)
        block = min(block, self.steps_per_epoch or block)
        while last is None or done < last:
            end = done + block if last is None else min(done + block, last)
            yield range(done + 1, end + 1)
            done = end

    def facts(self) -> dict[str, Any]:
        """Return everything that determines which samples a step has."""
        sources = self._mix.facts() if self._mix is not None else None
        return {
            "samples": self._count, "global_batch": self.global_batch, "seed": self.seed,
            "shuffle": self._shuffle, "drop_last": self._drop_last, "mix": sources,
        }  # fmt: skip

    def __getitem__(self, number: int) -> Step:
        """Return a step by its number, counted from 1."""
        if number < 1 or (self.steps is not None and number > self.steps):
            raise IndexError(
                f"trnslurm.batches: there is no step {number}: the last step is {self.steps}"
            )
        return next(self._steps(range(number, number + 1)))

    def span(self, number: int) -> tuple[int, int, int]:
        """Return a step's epoch, the position of its first sample, and its number of samples."""
        size = self.global_batch
        if self._count is None or self.steps_per_epoch is None:
            return 0, (number - 1) * size, size
        epoch, before = divmod(number - 1, self.steps_per_epoch)
        return epoch, epoch * self._count + before * size, min(size, self._count - before * size)

    def _steps(self, numbers: Sequence[int]) -> Iterator[Step]:
        runs, samples = self._placed(numbers)
        done = 0
        # Step by step, because thousands of objects at once slow down the garbage collector.
        for parts, _, steps in runs:
            for number, epoch, _, size in steps:
                micros = []
                for unit, length, weight, scale, last in parts:
                    end = done + length
                    key = (self.seed, number - 1, unit)
                    micros.append(MicroBatch(samples[done:end], weight, scale, last, key))
                    done = end
                yield Step(number, epoch, size, micros)

    def _placed(self, numbers: Sequence[int]) -> tuple[list[_Run], list[Any]]:
        """Return the steps in runs of equal size, and all of this worker's samples in them."""
        rank, workers = self._where()
        if self._needs_even and not self.even:
            each = f" in micro-batches of {self._micro}" if self._micro else ""
            raise ValueError(
                f"trnslurm.loader: {workers} workers cannot share global batches of "
                f"{self.global_batch}{each} and all of {self._count or 'a mix'} samples evenly: "
                "pass scales=True and multiply the loss by each batch's scale"
            )
        spans = ((number, *self.span(number)) for number in numbers)
        runs = [
            (*self._share(size, rank, workers), [*some])
            for size, some in groupby(spans, key=itemgetter(3))
        ]
        positions = [
            np.add.outer([first for _, _, first, _ in steps], places).ravel()
            for _, places, steps in runs
        ]
        return runs, self._at(np.concatenate(positions))

    def _share(self, size: int, rank: int, workers: int) -> tuple[list[_Part], NDArray[np.int64]]:
        """Return a worker's micro-batches of a step of `size`, and the positions of their samples.

        The result is the same for nearly all steps, so it is cached.
        """
        known = self._shares.get((size, rank, workers))
        if known is None:
            cuts, rounds = self._cuts(size, workers), self.accumulation
            parts, places = [], []
            for place, (unit, counts) in enumerate(deal(len(cuts) - 1, rank, workers, rounds)):
                length = cuts[unit + 1] - cuts[unit]
                counted = length if counts else 0
                scale = counted * rounds * workers / size
                parts.append((unit, length, counted / size, scale, place == rounds - 1))
                places.append(np.arange(cuts[unit], cuts[unit + 1]))
            known = self._shares[size, rank, workers] = (parts, np.concatenate(places))
        return known

    def _at(self, positions: NDArray[np.int64]) -> list[Any]:
        if self._mix is not None:
            return self._mix.samples_at(positions)
        assert self._count is not None
        if not self._shuffle:
            return list((positions % self._count).tolist())
        return list(indices_at(positions, count=self._count, seed=self.seed).tolist())

    def _cuts(self, size: int, workers: int) -> list[int]:
        """Return where a step is cut into micro-batches. The cuts do not depend on the workers.

        If no micro-batch size is set, each worker has one micro-batch, and their sizes differ by at
        most 1.
        """
        if self._micro is not None:
            return [*range(0, size, self._micro), size]
        parts = min(workers, size)
        return [size * part // parts for part in range(parts + 1)]

    def _most_units(self) -> int:
        size = self.global_batch if self._count is None else min(self.global_batch, self._count)
        return -(-size // (self._micro or 1))

    def _slots(self) -> int:
        return self.accumulation * self.world_size

    def _where(self) -> tuple[int, int]:
        """Return rank and world size, either as given or as they are now."""
        return self._place or place_now()


_used: Batches | None = None


def in_use() -> Batches | None:
    """Return the Batches whose steps were requested first: training's, not an evaluation's."""
    return _used


def batches(
    samples: int | Mix,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    seed: int = 0,
    epochs: int | None = None,
    steps: int | None = None,
    start: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
) -> Batches:
    """Return the steps of a training run as this worker computes them, for any number of workers.

    Each epoch has each sample once. An epoch's last step has the remaining samples, unless
    `drop_last` drops it.
    """
    return Batches(
        samples, global_batch=global_batch, micro_batch=micro_batch, seed=seed, epochs=epochs,
        steps=steps, start=start, shuffle=shuffle, drop_last=drop_last, rank=rank,
        world_size=world_size,
    )  # fmt: skip


def deal(count: int, worker: int, workers: int, rounds: int) -> list[tuple[int, bool]]:
    """Return which of a step's micro-batches a worker computes, and whether each of them counts.

    They are dealt out like cards. When none are left, a worker repeats a micro-batch, which then
    does not count: all workers compute equally often, and a valid repeated one cannot bring in NaN
    x 0.
    """
    dealt = range(worker, rounds * workers, workers)
    return [(place % count, place < count) for place in dealt]


def place_now() -> tuple[int, int]:
    """Return rank and world size, from the process group or the environment, or else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"trnslurm.batches: {otherwise}")
