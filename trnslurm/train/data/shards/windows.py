"""The order of samples in shards: shuffled every epoch, with neighbors read together.

Reading a random row of a gzipped shard means decompressing a thousand rows. So shards are cut into
pieces, pieces are shuffled, and samples are shuffled within windows of consecutive pieces. As in
order.py, everything depends only on (seed, epoch), and any position can be computed directly.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trnslurm.samples.order import derive_seed, indices

Integers = NDArray[np.int64]

PIECE = 8192
"""The most samples in a piece: many gzip chunks, because the chunks at its ends are wasted."""
PIECES_PER_WINDOW = 8
"""With 128 tokens per sample, a window takes up to 39 MB of a node's memory."""


Piece = tuple[int, slice]
"""Consecutive samples of one shard: its number, and their rows."""
WindowPart = tuple[int, slice]
"""Consecutive positions of the stream in one window: its number over all epochs, and the places."""


class Windows:
    """An endless stream: epoch after epoch of all samples, with any position computed directly."""

    def __init__(self, shard_samples: Sequence[int], *, seed: int) -> None:
        self.num_samples = sum(shard_samples)
        self._seed = seed
        self._pieces = [
            (shard, rows) for shard, samples in enumerate(shard_samples) for rows in _cut(samples)
        ]
        self._sizes = np.array([rows.stop - rows.start for _, rows in self._pieces])
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self.largest = PIECES_PER_WINDOW * int(self._sizes.max(initial=0))
        """An upper bound on the samples of the largest window."""
        self._per_epoch = -(-len(self._pieces) // PIECES_PER_WINDOW)
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)
        self.order = functools.lru_cache(maxsize=2)(self._make_order)
        """Return the order of a window's samples, which are numbered through its pieces."""

    def parts(self, first: int, count: int) -> Iterator[WindowPart]:
        """Yield where the samples at positions first … first + count - 1 of the stream are."""
        while count > 0:
            number, place = divmod(first, self.num_samples)
            _, starts = self._epoch(number)
            window = int(np.searchsorted(starts, place, side="right")) - 1
            start, stop = int(starts[window]), int(starts[window + 1])
            taken = min(count, stop - place)
            within = number * self._per_epoch + window
            yield within, slice(place - start, place - start + taken)
            first, count = first + taken, count - taken

    def size(self, window: int) -> int:
        """Return how many samples a window has."""
        return int(self._sizes[self._numbers(window)].sum())

    def pieces(self, window: int) -> list[Piece]:
        """Return the pieces of a window, in order."""
        return [self._pieces[number] for number in self._numbers(window)]

    def samples(self, window: int, places: slice) -> Integers:
        """Return which samples are at these places of a window, numbered through all shards."""
        numbers = self._numbers(window)
        rows = self.order(window)[places]
        stops = np.cumsum(self._sizes[numbers])
        piece = np.searchsorted(stops, rows, side="right")
        begins = stops - self._sizes[numbers]
        found: Integers = self._firsts[numbers][piece] + rows - begins[piece]
        return found

    def _numbers(self, window: int) -> Integers:
        epoch, place = divmod(window, self._per_epoch)
        first = place * PIECES_PER_WINDOW
        pieces, _ = self._epoch(epoch)
        return pieces[first : first + PIECES_PER_WINDOW]

    def _make_order(self, window: int) -> Integers:
        epoch, number = divmod(window, self._per_epoch)
        size = self.size(window)
        return indices(0, size, count=size, seed=derive_seed(self._seed, epoch, number, 0))

    def _make_epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the order of pieces, the beginning of each window, and the end of the last one."""
        count = len(self._pieces)
        order = indices(epoch * count, count, count=count, seed=self._seed)
        stops = np.cumsum(self._sizes[order])
        ends = stops[PIECES_PER_WINDOW - 1 :: PIECES_PER_WINDOW]
        starts = np.unique(np.concatenate([[0], ends, stops[-1:]]))
        return order, starts


def _cut(samples: int) -> Iterator[slice]:
    """Cut a shard into pieces of about the same size."""
    count = -(-samples // PIECE)
    for number in range(count):
        yield slice(number * samples // count, (number + 1) * samples // count)
