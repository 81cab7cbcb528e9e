"""The order of samples: a permutation per epoch, computed at any position on any worker count."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
from numpy.typing import NDArray

# Each round changes one half of the index; eight leave no pattern even for a few samples.
ROUNDS = 8

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def indices(first: int, n: int, *, count: int, seed: int) -> NDArray[np.int64]:
    """Return which of `count` samples are at positions first … first + n - 1 of an endless stream.

    Position p is in epoch p // count. Every epoch has each sample once, in an order that depends
    only on (seed, epoch). Nothing is stored, and the order is never computed in full.
    """
    assert first >= 0 and count > 0, (first, count)
    return indices_at(np.arange(first, first + n), count=count, seed=seed)


def indices_at(positions: NDArray[np.int64], *, count: int, seed: int) -> NDArray[np.int64]:
    """Return which of `count` samples are at these positions."""
    found = np.empty(len(positions), np.int64)
    epochs, places = np.divmod(positions, count)
    for epoch in np.unique(epochs):
        chosen = np.flatnonzero(epochs == epoch)
        keys = _keys(seed, int(epoch))
        found[chosen] = _permute(places[chosen].astype(np.uint64), count, keys)
    return found


def _permute(places: NDArray[np.uint64], count: int, keys: tuple[int, ...]) -> NDArray[np.int64]:
    """Permute range(count) with a Feistel network over the smallest near-square grid that fits it.

    A result of count or more is permuted again until it is below count (cycle walking). With sides
    of about √count, fewer than one cell in √count is outside the range. With a power of two, up to
    three in four could be.
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    result = _rounds(places, rows, columns, keys)
    while (beyond := result >= count).any():
        result[beyond] = _rounds(result[beyond], rows, columns, keys)
    return result.astype(np.int64)


def _rounds(
    places: NDArray[np.uint64], rows: int, columns: int, keys: tuple[int, ...]
) -> NDArray[np.uint64]:
    left, right = places // np.uint64(columns), places % np.uint64(columns)
    for number, key in enumerate(keys):
        # What is added depends only on the other half, so no two places collide.
        if number % 2 == 0:
            left = (left + _mix(right, key) % np.uint64(rows)) % np.uint64(rows)
        else:
            right = (right + _mix(left, key) % np.uint64(columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Spread every bit over all 64 bits. This is the final part of SplitMix64."""
    mixed = values ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    # From four numbers each, so that no key equals a unit's seed, which is made from three.
    halves = (
        (derive_seed(seed, epoch, r, 0), derive_seed(seed, epoch, r, 1)) for r in range(ROUNDS)
    )
    return tuple(high << 31 | low for high, low in halves)


def derive_seed(*parts: int) -> int:
    """Hash integers into one 31-bit seed, which also fits devices that use int32 seeds."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
