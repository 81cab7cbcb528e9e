"""The DataLoader over this worker's batches: in order, with a state of what was taken."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

import trnslurm
from trnslurm.samples.loader import Loader

OPTIONS = {"global_batch": 16, "micro_batch": 4, "seed": 3}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int, offset: int = 0) -> None:
        self.count, self.offset = count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": self.offset + index}


def taken(loader: Loader) -> dict[int, list[int]]:
    """The samples of each step of one iteration."""
    found: dict[int, list[int]] = {}
    for batch in loader:
        ids = batch["id"].tolist() if batch.get("scale", 1) else []
        found.setdefault(loader.step, []).extend(ids)
    return found


def expected(count: int, **options) -> dict[int, list[int]]:
    steps = trnslurm.batches(count, rank=0, world_size=1, **OPTIONS, **options)
    return {s.number: [i for m in s.micro_batches if m.weight for i in m.indices] for s in steps}


def test_it_is_a_dataloader_with_an_epoch_per_iteration() -> None:
    loader = trnslurm.loader(Numbers(64), **OPTIONS)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.steps_per_epoch, loader.accumulation) == (16, 4, 4)
    assert [loader.epoch, taken(loader) | taken(loader), loader.epoch] == [
        0, expected(64, epochs=2), 2]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 3])
def test_all_workers_together_have_the_order(workers: int) -> None:
    found: dict[int, list[int]] = {}
    for rank in range(workers):
        loader = trnslurm.loader(Numbers(70), rank=rank, world_size=workers, scales=True, **OPTIONS)
        for step, ids in taken(loader).items():
            found.setdefault(step, []).extend(ids)
    wanted = expected(70, epochs=1)
    assert {k: sorted(ids) for k, ids in found.items()} == {
        k: sorted(ids) for k, ids in wanted.items()
    }


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 4}])
def test_its_state_is_what_was_taken_not_what_was_prefetched(options) -> None:
    loader = trnslurm.loader(Numbers(64), **OPTIONS, **options)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    assert loader.ends_step and loader.state_dict() == {"step": 2}
    next(iterator)
    # Of step 3 a part was taken: its gradients are lost, so it is computed again.
    assert not loader.ends_step and loader.step == 3
    state = loader.state_dict()
    assert state == {"step": 2}
    other = trnslurm.loader(Numbers(64), **OPTIONS | {"micro_batch": 16})
    other.load_state_dict(state)
    rest = taken(other)
    assert rest == {k: v for k, v in expected(64, epochs=1).items() if k > 2}
    other.load_state_dict({})
    assert other.state_dict() == {"step": 4}


def test_an_iteration_goes_on_where_the_one_before_was_left() -> None:
    loader = trnslurm.loader(Numbers(64), **OPTIONS)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert list(taken(loader)) == [2, 3, 4]


def test_an_epoch_is_chosen_but_never_an_earlier_one() -> None:
    loader = trnslurm.loader(Numbers(64), **OPTIONS, start=5)
    loader.set_epoch(0)
    loader.set_epoch(1)  # in the middle of which it is
    assert loader.state_dict() == {"step": 5}
    loader.set_epoch(3)
    assert loader.state_dict() == {"step": 12}


def test_iterations_take_none_of_the_scripts_random_numbers() -> None:
    before = torch.get_rng_state()
    taken(trnslurm.loader(Numbers(64), **OPTIONS))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("collate", "scale"),
    [
        (None, lambda batch: batch["scale"]),
        (lambda samples: [s["id"] for s in samples], lambda batch: batch[-1]),
        (lambda samples: default_collate(samples)["id"], lambda batch: batch[1]),
    ],
)
def test_a_batch_has_its_scale(collate, scale) -> None:
    loader = trnslurm.loader(Numbers(18), scales=True, collate_fn=collate, **OPTIONS)
    # The second step has one micro-batch of two samples, and three that do not count.
    assert [scale(batch) for batch in loader] == [1, 1, 1, 1, 4, 0, 0, 0]


def test_what_plain_means_would_get_wrong_is_refused() -> None:
    loader = trnslurm.loader(Numbers(18), **OPTIONS)
    with pytest.raises(ValueError, match="pass scales=True"):
        next(iter(loader))


def test_a_mix_reads_several_datasets() -> None:
    mix = trnslurm.mix({"a": (30, 0.75), "b": (9, 0.25)}, global_batch=16)
    datasets = {"a": Numbers(30), "b": Numbers(9, offset=100)}
    loader = trnslurm.loader(datasets, mix=mix, steps_per_epoch=3)
    found = taken(loader) | taken(loader)
    assert [sum(i >= 100 for i in ids) for ids in found.values()] == [4] * 6
    first = next(iter(trnslurm.batches(mix))).micro_batches[0].indices
    assert found[1] == [i + 100 * (name == "b") for name, i in first]
    with pytest.raises(ValueError, match="the mix was made for"):
        trnslurm.loader(datasets | {"b": Numbers(8)}, mix=mix, steps_per_epoch=3)
    with pytest.raises(ValueError, match="steps_per_epoch is missing"):
        trnslurm.loader(datasets, mix=mix)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(9)


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        (Stream(), {}, "IterableDataset decides its order itself: pass .* trnslurm.dataset"),
        (Numbers(9), {"batch_size": 3}, "omit batch_size"),
        (Numbers(9), {"sampler": None}, "omit sampler"),
        (Numbers(9), {"in_order": False}, "omit in_order"),
        (Numbers(9), {"steps_per_epoch": 3}, "steps_per_epoch requires a mix"),
    ],
)
def test_what_cannot_be_exact_is_refused(dataset, options, error) -> None:
    with pytest.raises(ValueError, match=error):
        trnslurm.loader(dataset, **OPTIONS, **options)
