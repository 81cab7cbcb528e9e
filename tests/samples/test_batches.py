"""What each step computes, and which part of it a worker does: exact on any number of workers."""

from __future__ import annotations

import sys
import types
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trnslurm
from trnslurm.samples.batches import place_now

SHAPES = {
    "samples": st.integers(1, 60),
    "global_batch": st.integers(1, 30),
    "micro_batch": st.one_of(st.none(), st.integers(1, 9)),
    "workers": st.integers(1, 5),
    "seed": st.integers(0, 2**31),
}


def on_all(samples, workers, **options):
    """The steps of each worker, by their numbers."""
    every = [
        list(trnslurm.batches(samples, rank=rank, world_size=workers, **options))
        for rank in range(workers)
    ]
    return list(zip(*every, strict=True))


def counted(steps):
    """The samples that count in one step, over its workers."""
    return [i for step in steps for m in step.micro_batches if m.weight for i in m.indices]


@given(**SHAPES)
@settings(deadline=None)
def test_an_epoch_has_each_sample_once(samples, global_batch, micro_batch, workers, seed):
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
    found = [{}, {}]
    for steps in on_all(samples, workers, epochs=2, **options):
        found[steps[0].epoch][steps[0].number] = ids = counted(steps)
        assert steps[0].samples == len(ids) <= global_batch
    for epoch in found:
        assert sorted(i for ids in epoch.values() for i in ids) == list(range(samples))


@given(**SHAPES)
@settings(deadline=None)
def test_the_weights_make_the_exact_mean(samples, global_batch, micro_batch, workers, seed):
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
    for steps in on_all(samples, workers, epochs=1, **options):
        micros = [m for step in steps for m in step.micro_batches]
        exact = [Fraction(len(m.indices) if m.weight else 0, steps[0].samples) for m in micros]
        assert sum(exact) == 1
        for micro, weight in zip(micros, exact, strict=True):
            assert micro.weight == float(weight)
            assert micro.scale == float(weight * len(micros))
        # Every worker computes equally often, and never nothing.
        assert len({len(step.micro_batches) for step in steps}) == 1
        assert all(m.indices for m in micros)
        for step in steps:
            assert [m for m in step.micro_batches if m.last] == step.micro_batches[-1:]


@given(other=st.integers(1, 5), **SHAPES)
@settings(deadline=None)
def test_the_order_is_the_same_on_other_workers(
    samples, global_batch, micro_batch, workers, seed, other
):
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
    one, two = (on_all(samples, each, epochs=2, **options) for each in (workers, other))
    assert [sorted(counted(steps)) for steps in one] == [sorted(counted(steps)) for steps in two]
    if micro_batch:
        # The micro-batches themselves are the same, and what is random in them.
        cut = [
            {(*m.indices, m.seed) for step in steps for m in step.micro_batches} for steps in one
        ]
        assert cut == [
            {(*m.indices, m.seed) for step in steps for m in step.micro_batches} for steps in two
        ]


@given(data=st.data(), **SHAPES)
@settings(deadline=None)
def test_it_resumes_after_any_step(samples, global_batch, micro_batch, workers, seed, data):
    rank = data.draw(st.integers(0, workers - 1))
    options = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed,
               "rank": rank, "world_size": workers, "epochs": 3}  # fmt: skip
    whole = list(trnslurm.batches(samples, **options))
    start = data.draw(st.integers(0, len(whole)))
    resumed = trnslurm.batches(samples, start=start, **options)
    assert list(resumed) == whole[start:]
    assert [resumed[step.number] for step in whole] == whole
    with pytest.raises(IndexError):
        resumed[len(whole) + 1]


def test_a_block_of_steps_ends_nowhere_special(monkeypatch) -> None:
    options = {"global_batch": 7, "micro_batch": 2, "rank": 1, "world_size": 2, "epochs": 4}
    at_once = list(trnslurm.batches(50, **options))
    monkeypatch.setattr("trnslurm.samples.batches._BLOCK", 10)
    assert list(trnslurm.batches(50, **options)) == at_once


def test_what_is_left_of_an_epoch_can_be_dropped() -> None:
    found = on_all(50, 2, global_batch=16, drop_last=True, epochs=2)
    assert [len(counted(steps)) for steps in found] == [16] * 6
    assert max(Counter(i for steps in found[:3] for i in counted(steps)).values()) == 1


def test_without_shuffle_samples_come_in_turn() -> None:
    found = on_all(10, 1, global_batch=4, shuffle=False, epochs=2)
    assert [counted(steps)[:2] for steps in found] == 2 * [[0, 1], [4, 5], [8, 9]]


def test_no_end_is_needed() -> None:
    steps = iter(trnslurm.batches(3, global_batch=2, start=10**9, rank=0, world_size=1))
    assert next(steps).number == 10**9 + 1


@pytest.mark.parametrize(
    ("samples", "global_batch", "micro_batch", "workers", "even"),
    [
        (64, 16, 4, 2, True),
        (64, 16, 4, 3, False),  # a micro-batch that counts for nothing
        (64, 16, None, 2, True),
        (64, 16, None, 3, False),  # 6 samples, 5, 5
        (65, 16, 4, 2, False),  # the last step has one sample
        (64, 16, 5, 1, False),  # the last micro-batch has one sample
        (3, 16, 1, 2, False),
    ],
)
def test_it_knows_where_plain_means_are_exact(samples, global_batch, micro_batch, workers, even):
    options = {"global_batch": global_batch, "micro_batch": micro_batch}
    found = trnslurm.batches(samples, rank=0, world_size=workers, **options)
    assert found.even == even
    scales = {
        m.scale
        for steps in on_all(samples, workers, epochs=1, **options)
        for step in steps
        for m in step.micro_batches
    }
    assert (scales == {1.0}) == even


def test_the_place_is_of_the_process_group_or_of_the_environment(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert place_now() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    found = trnslurm.batches(9, global_batch=5)
    assert (found.rank, found.world_size) == place_now() == (2, 5)
    group = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1,
        get_world_size=lambda: 3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert (found.rank, found.world_size) == (1, 3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({}, "global_batch is missing"),
        ({"global_batch": 4, "micro_batch": 0}, "micro_batch is 0"),
        ({"global_batch": 4, "start": -1}, "start is -1"),
        ({"global_batch": 4, "epochs": 1, "steps": 3}, "not both"),
        ({"global_batch": 4, "rank": 1}, "rank and world_size together"),
        ({"global_batch": 4, "rank": 2, "world_size": 2}, "ranks start at 0"),
        ({"global_batch": 40, "drop_last": True}, "drop_last leaves nothing"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(options, error) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        trnslurm.batches(10, **options)
    assert str(raised.value).startswith("trnslurm.batches: ") and "\n" not in str(raised.value)
