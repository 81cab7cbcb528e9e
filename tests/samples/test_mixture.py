"""A mix of sources: exact counts at every position, each sample once in its source's epochs."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trnslurm

SIZES = {"web": 31, "code": 7, "math": 3, "wiki": 12}
WEIGHTS = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)
CHANGES = st.lists(WEIGHTS, min_size=1, max_size=4)
STEPS = 5
"""Between two changes."""


def made(changes, global_batch=8, seed=1):
    weights = [dict(zip(SIZES, each, strict=True)) for each in changes]
    return trnslurm.mix(
        {name: (count, weights[0][name]) for name, count in SIZES.items()},
        global_batch=global_batch,
        seed=seed,
        schedule=[(STEPS * number, each) for number, each in enumerate(weights) if number],
    )


@given(changes=CHANGES, global_batch=st.integers(1, 20))
@settings(deadline=None)
def test_counts_are_the_shares_rounded(changes, global_batch):
    mix = made(changes, global_batch)
    exact = dict.fromkeys(SIZES, Fraction(0))
    for position in range((len(changes) + 1) * STEPS * global_batch):
        found = mix.counts(position)
        assert sum(found.values()) == position
        if len(changes) == 1:
            assert all(abs(found[name] - exact[name]) <= 1 for name in SIZES)
        else:
            assert all(abs(found[name] - exact[name]) < 3 for name in SIZES)
        weights = changes[min(position // (STEPS * global_batch), len(changes) - 1)]
        for name, weight in zip(SIZES, weights, strict=True):
            exact[name] += Fraction(weight, sum(weights))


@given(changes=CHANGES, seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_positions_give_those_counts_and_each_sample_once_an_epoch(changes, seed):
    mix = made(changes, seed=seed)
    end = (len(changes) + 1) * STEPS * 8
    found = mix.samples_at(np.arange(end))
    assert Counter(name for name, _ in found) == +Counter(mix.counts(end))
    by_source = defaultdict(list)
    for name, index in found:
        by_source[name].append(index)
    for name, indices in by_source.items():
        for first in range(0, len(indices) - SIZES[name] + 1, SIZES[name]):
            assert sorted(indices[first : first + SIZES[name]]) == list(range(SIZES[name]))


@given(changes=CHANGES, data=st.data())
@settings(deadline=None)
def test_a_position_is_known_without_those_before(changes, data):
    mix = made(changes)
    chosen = data.draw(st.lists(st.integers(0, 300), min_size=1))
    together = mix.samples_at(np.arange(301))
    assert mix.samples_at(np.array(chosen)) == [together[position] for position in chosen]


@given(changes=CHANGES, workers=st.integers(1, 5), start=st.integers(0, 12))
@settings(deadline=None)
def test_it_is_the_same_on_any_workers_and_after_a_resume(changes, workers, start):
    mix = made(changes)
    options = {"micro_batch": 3, "steps": 15, "start": start}
    parts = [
        list(trnslurm.batches(mix, rank=rank, world_size=workers, **options))
        for rank in range(workers)
    ]
    for steps in zip(*parts, strict=True):
        ids = [i for step in steps for m in step.micro_batches if m.weight for i in m.indices]
        first = (steps[0].number - 1) * 8
        assert sorted(ids) == sorted(mix.samples_at(np.arange(first, first + 8)))


def test_it_reports_what_each_source_gave() -> None:
    mix = trnslurm.mix(
        {"web": (1000, 0.7), "code": (100, 0.3)},
        global_batch=10,
        schedule=[(100, {"code": 1})],
    )
    assert mix.shares(99) == {"web": 0.7, "code": 0.3}
    assert mix.shares(100) == {"web": 0.0, "code": 1.0}
    found = mix.report(110)
    assert found["web"] == {"samples": 700, "share": 700 / 1100, "epochs": 0.7, "rate": 0.7}
    assert found["code"] == {"samples": 400, "share": 400 / 1100, "epochs": 4.0, "rate": 4.0}
    assert mix.report(0)["web"]["share"] == 0


def test_shares_without_a_small_common_denominator_are_kept_to_a_millionth() -> None:
    mix = trnslurm.mix({"a": (5, 2**0.5), "b": (5, 3**0.5)}, global_batch=1)
    share = 2**0.5 / (2**0.5 + 3**0.5)
    assert mix.counts(10**12)["a"] == pytest.approx(share * 10**12, rel=2e-6)


@pytest.mark.parametrize(
    ("sources", "schedule", "error"),
    [
        ({}, [], "sources is empty"),
        ({"a": (0, 1)}, [], "'a' has 0 samples"),
        ({"a": (3, -1)}, [], "use positive numbers or 0"),
        ({"a": (3, 0)}, [], "but not only 0"),
        ({"a": (3, 1)}, [(5, {"b": 1})], "'b', which is not a source"),
        ({"a": (3, 1)}, [(5, {"a": 1}), (5, {"a": 2})], "must be ascending"),
    ],
)
def test_a_wrong_mix_is_refused_in_one_line(sources, schedule, error) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        trnslurm.mix(sources, global_batch=4, schedule=schedule)
    assert "\n" not in str(raised.value)
