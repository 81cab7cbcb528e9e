"""PyTorch's DataLoader over this worker's batches, with a single integer as its state.

Other libraries accept it because it is a DataLoader. It provides what accelerate 1.15, Lightning
2.6, transformers 4.57, torchdata 0.11 and torchtitan 0.3 expect of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from trnslurm.samples.batches import Batches
from trnslurm.samples.mixture import Mix
from trnslurm.samples.order import derive_seed

SCALE = "scale"
# Options that the order determines, so users must not pass them.
_DECIDED = ("batch_size", "batch_sampler", "sampler")


class Loader(DataLoader[Any]):
    """A DataLoader whose batches are this worker's micro-batches, epoch by epoch.

    Each iteration starts where the previous one stopped and continues to the end of the epoch.
    """

    # accelerate uses such a loader unchanged, and saves and loads its state.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self, dataset: Any, batches: Batches, pass_steps: int, scales: bool, options: dict[str, Any]
    ) -> None:
        self.batches = batches
        self._order = _Order(batches, pass_steps, scales)
        if scales:
            dataset = _Scaled(dataset)
            options["collate_fn"] = _Collate(options.get("collate_fn") or default_collate)
        # Otherwise every iteration would draw from the script's own random numbers.
        options.setdefault("generator", torch.Generator())
        super().__init__(dataset, batch_sampler=self._order, **options)

    @property
    def step(self) -> int:
        """The step of the latest batch, counted from 1, or 0 before the first batch."""
        return self._order.step

    @property
    def ends_step(self) -> bool:
        """Whether the latest batch is the last one of its step."""
        return self.step == self._order.done

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._order.epoch

    @property
    def accumulation(self) -> int:
        """How many batches make up a step."""
        return self.batches.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an iteration has."""
        return self._order.pass_steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the remaining batches of the epoch, and count those that are consumed."""
        order = self._order
        order.settle()
        if self.generator is not None:
            self.generator.manual_seed(derive_seed(self.batches.seed, order.done))
        for batch in super().__iter__():
            order.taken += 1
            if not order.taken % order.accumulation:  # prefetched batches do not count
                self.batches.position = order.done
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Skip to the first batch of a later epoch; do nothing if the epoch is not a later one."""
        if epoch > self.epoch:
            self.load_state_dict({"step": epoch * self._order.pass_steps})

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps whose batches were all consumed, not only prefetched."""
        return {"step": self._order.done}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after these steps, on any number of workers."""
        if state_dict:  # torchtitan passes an empty one
            self._order.base, self._order.taken = int(state_dict["step"]), 0


class _Order:
    """The batch sampler: the samples of each of this worker's micro-batches."""

    def __init__(self, batches: Batches, pass_steps: int, scales: bool) -> None:
        self.pass_steps = pass_steps
        self.base, self.taken = batches.start, 0
        """Steps completed at the last start, and micro-batches consumed since."""
        self.accumulation = 1
        """Micro-batches in a step on this number of workers."""
        self._batches, self._scales = batches, scales

    @property
    def done(self) -> int:
        """The number of steps whose micro-batches were all consumed."""
        return self.base + self.taken // self.accumulation

    @property
    def step(self) -> int:
        """The step of the latest micro-batch."""
        return self.base + -(-self.taken // self.accumulation)

    @property
    def epoch(self) -> int:
        """The epoch of the next micro-batch."""
        return self.done // self.pass_steps

    def settle(self) -> None:
        """Start again with the step whose micro-batches were only partly consumed."""
        self.base, self.taken = self.done, 0
        self.accumulation = self._batches.accumulation

    def __len__(self) -> int:
        return self.pass_steps * self._batches.accumulation

    def __iter__(self) -> Iterator[Any]:
        first = self.done
        last = first - first % self.pass_steps + self.pass_steps
        for indices, scale in self._batches.rows(first, last):
            # The scale is passed to the process that reads the samples.
            yield (indices, scale) if self._scales else indices


class _Scaled(Dataset[Any]):
    """A dataset that passes a micro-batch's scale to the collate function."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._at_once = hasattr(dataset, "__getitems__")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices_and_scale: tuple[list[Any], float]) -> tuple[float, Any]:
        (indices, scale), dataset = indices_and_scale, self._dataset
        if self._at_once:
            return scale, dataset.__getitems__(indices)
        return scale, [dataset[index] for index in indices]


class _Collate:
    """Collates samples and adds the scale."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, scaled: tuple[float, Any]) -> Any:
        # A number, because a tensor from another process costs as much as a small batch.
        scale, batch = scaled[0], self._collate(scaled[1])
        if type(batch) is dict or isinstance(batch, Mapping):
            batch[SCALE] = scale  # type: ignore[index]
            return batch
        if type(batch) in (list, tuple):
            return type(batch)([*batch, scale])
        return batch, scale


class _Sources(Dataset[Any]):
    """Several datasets as one, whose samples are indexed by pairs of a name and an index."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._datasets = dict(datasets)

    def __len__(self) -> int:
        return sum(map(len, self._datasets.values()))

    def __getitem__(self, index: tuple[str, int]) -> Any:
        return self._datasets[index[0]][index[1]]


def loader(
    dataset: Any,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    seed: int = 0,
    mix: Mix | None = None,
    steps_per_epoch: int | None = None,
    scales: bool = False,
    start: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> Loader:
    """Return a DataLoader over this worker's batches; `options` are passed to DataLoader.

    Without a mix, an iteration is an epoch. With a mix, `dataset` maps each source to its dataset,
    and an iteration has `steps_per_epoch` steps.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError("trnslurm.loader: an IterableDataset decides its order itself: pass a "
                         "dataset with __len__ and __getitem__, such as trnslurm.dataset(path) for "
                         "WebDataset, MDS, Parquet or JSON lines")  # fmt: skip
    for name in (*_DECIDED, *(["in_order"] if not options.get("in_order", True) else [])):
        if name in options:
            raise ValueError(f"trnslurm.loader: omit {name}: global_batch, micro_batch and shuffle "
                             "determine the order of the samples")  # fmt: skip
    samples: Any = mix
    if mix is None:
        if steps_per_epoch is not None:
            raise ValueError("trnslurm.loader: steps_per_epoch requires a mix: without a mix, an "
                             "epoch has each sample once")  # fmt: skip
        samples = len(dataset)
    else:
        if steps_per_epoch is None:
            raise ValueError("trnslurm.loader: steps_per_epoch is missing: pass the number of "
                             "steps per iteration")  # fmt: skip
        given = {name: len(each) for name, each in dataset.items()}
        if given != mix.sizes:
            raise ValueError(f"trnslurm.loader: the datasets have {given} samples, but the mix was "
                             f"made for {mix.sizes}")  # fmt: skip
        dataset = _Sources(dataset)
    found = Batches(
        samples, global_batch=global_batch, micro_batch=micro_batch, seed=seed, epochs=None,
        steps=None, start=start, shuffle=shuffle, drop_last=drop_last, rank=rank,
        world_size=world_size, needs_even=not scales,
    )  # fmt: skip
    pass_steps = found.steps_per_epoch or steps_per_epoch
    assert pass_steps
    return Loader(dataset, found, pass_steps, scales, options)
