"""Pairs of texts for next sentence prediction: B follows A, or is from another document."""

import random
from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.bert.corpus import Corpus
from trnslurm.prepare.bert.settings import SHORT_SHARE, SPECIAL, SampleSettings

# The columns of pairs: where A and B begin and end in the corpus's tokens, and whether B is random.
A_FIRST, A_END, B_FIRST, B_END, RANDOM_NEXT = range(5)


def make_pairs(
    corpus: Corpus, documents: list[int], settings: SampleSettings, seed: str
) -> NDArray[np.int64]:
    """Return the pairs from some documents, one per row, in random order and none too long.

    Sentences are consecutive in the corpus, so A and B are one range of tokens each.
    """
    maker = _Maker([corpus.starts(number) for number in documents], settings, seed)
    for _ in range(settings.dupe_factor):
        for number in range(len(documents)):
            maker.add(number)
    pairs = np.array(maker.rows, np.int64).reshape(-1, 5)
    numbers = np.random.default_rng([*seed.encode()])
    _truncate(pairs, settings.seq_len - SPECIAL, numbers)
    return pairs[np.argsort(numbers.random(len(pairs)), kind="stable")]


class _Maker:
    """Walks through documents as BERT's create_pretraining_data does."""

    def __init__(self, starts: list[list[int]], settings: SampleSettings, seed: str) -> None:
        self._starts = starts
        self._most = settings.seq_len - SPECIAL
        self._random = random.Random(seed).random
        self._owed = 0
        self.rows = array("q")

    def add(self, number: int) -> None:
        """Add the pairs of one document, each with as many sentences as fit."""
        starts, target = self._starts[number], self._most
        if self._random() < SHORT_SHARE:
            target = 2 + self._below(self._most - 1)
        first, end = 0, len(starts) - 1
        while first < end:
            last = min(bisect_left(starts, starts[first] + target, first + 1), end)
            choices = last - first - 1
            middle = first + 1 + (self._below(choices) if choices else 0)
            if self._is_random(alone=not choices):
                b_first, b_end = self._random_part(number, target - starts[middle] + starts[first])
                self.rows.extend((starts[first], starts[middle], b_first, b_end, 1))
                first = middle  # the sentences after A have not been used yet
            else:
                self.rows.extend((starts[first], starts[middle], starts[middle], starts[last], 0))
                first = last

    def _is_random(self, *, alone: bool) -> bool:
        """Flip a coin, unless A is alone: no sentence can follow it, so B must be random.

        For each such A, the next pair with a choice gets the sentences that follow, so that both
        kinds of pairs remain equally frequent.
        """
        if alone:
            self._owed += 1
            return True
        if self._owed:
            self._owed -= 1
            return False
        return self._random() < 0.5

    def _random_part(self, number: int, length: int) -> tuple[int, int]:
        """Return sentences of about this length from a random other document."""
        other = self._below(len(self._starts) - 1)
        starts = self._starts[other + (other >= number)]
        end = len(starts) - 1
        first = self._below(end)
        last = min(bisect_left(starts, starts[first] + length, first + 1), end)
        return starts[first], starts[last]

    def _below(self, count: int) -> int:
        # Several times faster than randrange, and most of the time is spent here.
        return int(self._random() * count)


def _truncate(pairs: NDArray[np.int64], most: int, numbers: np.random.Generator) -> None:
    """Cut pairs that are too long: drop tokens of the longer part, randomly at its front or end."""
    lengths = pairs[:, [A_END, B_END]] - pairs[:, [A_FIRST, B_FIRST]]
    shorter = np.minimum(lengths[:, 0], lengths[:, 1])
    # The longer part gets the rest, at least half. If the number is odd, A gets one more.
    halves = np.array([(most + 1) // 2, most // 2])
    kept = np.minimum(lengths, np.maximum(most - shorter[:, None], halves))
    too_long = lengths.sum(axis=1) > most
    cut = np.where(too_long[:, None], lengths - kept, 0)
    front = numbers.binomial(cut, 0.5)
    pairs[:, [A_FIRST, B_FIRST]] += front
    pairs[:, [A_END, B_END]] -= cut - front
