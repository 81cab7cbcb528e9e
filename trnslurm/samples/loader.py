"""PyTorch's DataLoader over the batches of this worker, with a state of one integer.

Other libraries take it for the DataLoader that it is. What they ask of it is of accelerate 1.15,
Lightning 2.6, transformers 4.57, torchdata 0.11 and torchtitan 0.3.
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
# What the order decides, so that nothing else may.
_DECIDED = ("batch_size", "batch_sampler", "sampler")


class Loader(DataLoader[Any]):
    """A DataLoader whose batches are this worker's micro-batches, epoch by epoch.

    An iteration goes on to the end of its epoch, from where the one before was left.
    """

    # accelerate takes such a loader as it is, and saves and loads its state.
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
        # Else every iteration would take a number from the script's own random numbers.
        options.setdefault("generator", torch.Generator())
        super().__init__(dataset, batch_sampler=self._order, **options)

    @property
    def step(self) -> int:
        """The step that the latest batch belongs to, counted from 1; 0 before the first."""
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
        """How many batches make a step."""
        return self.batches.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an iteration has."""
        return self._order.pass_steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches that are left of the epoch, and count those that are taken."""
        order = self._order
        order.settle()
        if self.generator is not None:
            self.generator.manual_seed(derive_seed(self.batches.seed, order.done))
        for batch in super().__iter__():
            order.taken += 1
            self.batches.position = order.done  # what was prefetched does not count
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go on to the first batch of an epoch, if this one is an earlier one."""
        if epoch > self.epoch:
            self.load_state_dict({"step": epoch * self._order.pass_steps})

    def state_dict(self) -> dict[str, Any]:
        """Return the steps whose batches were all taken; prefetched ones do not count."""
        return {"step": self._order.done}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after these steps, on whatever number of workers."""
        if state_dict:  # torchtitan hands over an empty one
            self._order.base, self._order.taken = int(state_dict["step"]), 0


class _Order:
    """The batch sampler: the samples of each of this worker's micro-batches."""

    def __init__(self, batches: Batches, pass_steps: int, scales: bool) -> None:
        self.pass_steps = pass_steps
        self.base, self.taken = batches.start, 0
        """Steps that were done at the last start, and micro-batches taken since."""
        self._batches, self._scales = batches, scales

    @property
    def done(self) -> int:
        """The steps of which all micro-batches were taken."""
        return self.base + self.taken // self._batches.accumulation

    @property
    def step(self) -> int:
        """The step that has the latest micro-batch."""
        return self.base + -(-self.taken // self._batches.accumulation)

    @property
    def epoch(self) -> int:
        """The epoch of the next micro-batch."""
        return self.done // self.pass_steps

    def settle(self) -> None:
        """Begin again with the step of which some micro-batches were taken."""
        self.base, self.taken = self.done, 0

    def __len__(self) -> int:
        return self.pass_steps * self._batches.accumulation

    def __iter__(self) -> Iterator[list[Any]]:
        first = self.done
        last = first - first % self.pass_steps + self.pass_steps
        for indices, scale in self._batches.rows(first, last):
            # The scale goes along to whoever reads the samples, in a process of its own.
            yield [*indices, scale] if self._scales else indices


class _Scaled(Dataset[Any]):
    """A dataset that hands a micro-batch's scale on to what collates it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices_and_scale: list[Any]) -> tuple[float, Any]:
        *indices, scale = indices_and_scale
        if hasattr(self._dataset, "__getitems__"):
            return scale, self._dataset.__getitems__(indices)
        return scale, [self._dataset[index] for index in indices]


class _Collate:
    """Collates samples, and adds the scale."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, scaled: tuple[float, Any]) -> Any:
        # A number: a tensor from another process costs as much as a small batch.
        scale, batch = scaled[0], self._collate(scaled[1])
        if isinstance(batch, Mapping):
            batch[SCALE] = scale  # type: ignore[index]
            return batch
        if type(batch) in (list, tuple):
            return type(batch)([*batch, scale])
        return batch, scale


class _Sources(Dataset[Any]):
    """Several datasets, whose samples are named by pairs."""

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
    """Return a DataLoader over this worker's batches; `options` are those of DataLoader.

    Without a mix, an iteration is an epoch. With one, `dataset` has a dataset for each source, and
    an iteration has `steps_per_epoch` steps.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError("trnslurm.loader: an IterableDataset cannot be read in a given order: "
                         "give a dataset with __len__ and __getitem__")  # fmt: skip
    for name in (*_DECIDED, *(["in_order"] if not options.get("in_order", True) else [])):
        if name in options:
            raise ValueError(f"trnslurm.loader: leave {name} out: global_batch, micro_batch and "
                             "shuffle decide which samples come when")  # fmt: skip
    samples: Any = mix
    if mix is None:
        if steps_per_epoch is not None:
            raise ValueError("trnslurm.loader: leave steps_per_epoch out: an epoch has each sample "
                             "once, and only a mix has none")  # fmt: skip
        samples = len(dataset)
    else:
        if steps_per_epoch is None:
            raise ValueError("trnslurm.loader: steps_per_epoch is missing: say how "
                             "many steps an iteration has")  # fmt: skip
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
