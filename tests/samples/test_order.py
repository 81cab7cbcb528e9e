"""The order of samples: each once an epoch, by seed and epoch alone, and without a pattern."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnslurm.samples.order import indices

COUNTS = st.one_of(st.integers(1, 50), st.integers(51, 20_000))
SEEDS = st.integers(0, 2**31)
PATTERN_COUNTS = [997, 1024, 1025, 4096, 10_000, 65_537]


def epoch_order(count, *, seed=1, epoch=0):
    return indices(epoch * count, count, count=count, seed=seed)


@given(count=COUNTS, seed=SEEDS, epoch=st.integers(0, 10**9))
@settings(deadline=None)
def test_an_epoch_holds_every_sample_once(count, seed, epoch):
    order = epoch_order(count, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@given(count=COUNTS, seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_a_sample_depends_on_its_position_alone(count, seed, data):
    """However the stream is cut: at other places, into single samples, across epochs."""
    first = data.draw(st.integers(0, 5 * count))
    together = indices(first, 40, count=count, seed=seed)
    cut = data.draw(st.integers(0, 40))
    pieces = [indices(first + a, b - a, count=count, seed=seed) for a, b in ((0, cut), (cut, 40))]
    assert np.array_equal(np.concatenate(pieces), together)
    alone = data.draw(st.integers(0, 39))
    assert indices(first + alone, 1, count=count, seed=seed) == together[alone]


def test_any_position_of_a_huge_stream_is_known_at_once():
    """An order made as a whole would need terabytes here."""
    count = 10**12 + 39
    found = indices(7 * count - 500, 1000, count=count, seed=3)
    assert len(set(found[:500].tolist())) == len(set(found[500:].tolist())) == 500
    assert found.min() >= 0 and found.max() < count
    # Spread over all of the stream, and not where the positions are.
    assert np.histogram(found, bins=4, range=(0, count))[0].min() > 180


def test_nothing_is_nothing():
    assert indices(5, 0, count=3, seed=1).tolist() == []


@given(count=st.integers(20, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_every_epoch_and_seed_has_an_order_of_its_own(count, seed, epoch):
    order = epoch_order(count, seed=seed, epoch=epoch)
    for other in (
        epoch_order(count, seed=seed, epoch=epoch + 1),
        epoch_order(count, seed=seed + 1, epoch=epoch),
    ):
        # Two orders share one place on average, whatever their length.
        assert (order == other).sum() < 15


@pytest.mark.parametrize("count", PATTERN_COUNTS)
def test_an_order_has_no_pattern(count):
    assert_random(epoch_order(count, seed=4))


@pytest.mark.parametrize("count", PATTERN_COUNTS)
def test_the_way_from_an_epoch_to_the_next_has_no_pattern(count):
    """As it would if, say, the second were the first moved by some places."""
    before = np.argsort(epoch_order(count, seed=4))
    assert_random(before[epoch_order(count, seed=4, epoch=1)])


@pytest.mark.parametrize(
    "order",
    [
        np.arange(1024),
        np.arange(1024)[::-1],
        np.roll(np.arange(1024), 341),
        np.arange(1024) * 389 % 1024,
        np.arange(1024) ^ 0b1010110101,
    ],
)
def test_the_search_for_patterns_finds_them(order):
    with pytest.raises(AssertionError):
        assert_random(order)


def assert_random(order):
    """What holds for all but one in millions of all permutations."""
    count = len(order)
    places = np.arange(count)
    # A sample moves by a third of the length on average.
    assert abs(np.abs(order - places).mean() / count - 1 / 3) < 1 / np.sqrt(count)
    # Samples in their own place: 1 on average; former neighbours side by side: 2.
    assert (order == places).sum() < 12
    steps = np.diff(order)
    assert (np.abs(steps) == 1).sum() < 15
    # Steps from one sample to the next, around the circle: 1 - 1/e of all lengths appear.
    assert abs(len(np.unique(steps % count)) / count - (1 - 1 / np.e)) < 3 / np.sqrt(count)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_comes_about_as_often(count):
    seeds = range(3000)
    orders = Counter(tuple(epoch_order(count, seed=seed).tolist()) for seed in seeds)
    expected = len(seeds) / np.prod(range(1, count + 1))
    assert len(orders) == np.prod(range(1, count + 1))
    assert max(orders.values()) < 2.2 * expected
