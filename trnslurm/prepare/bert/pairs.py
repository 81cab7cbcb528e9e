"""Pairs of text for next sentence prediction: B follows A in its document, or is from another."""

import random
from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from trnslurm.prepare.bert.corpus import Corpus
from trnslurm.prepare.bert.settings import SHORT_SHARE, SPECIAL, Settings

# The columns of pairs: where in the corpus's tokens A and B begin and end, and whether B is random.
A_FIRST, A_END, B_FIRST, B_END, RANDOM_NEXT = range(5)


def make_pairs(
    corpus: Corpus, documents: list[int], settings: Settings, seed: str
) -> NDArray[np.int64]:
    """Give the pairs of some documents, a row each, in random order and none too long.

    Sentences lie one behind another in the corpus, so that A and B are but a place each.
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

    def __init__(self, starts: list[list[int]], settings: Settings, seed: str) -> None:
        self._starts = starts
        self._most = settings.seq_len - SPECIAL
        self._dice = random.Random(seed)
        self._owed = 0
        self.rows = array("q")

    def add(self, number: int) -> None:
        """Add the pairs of one document: as many sentences for each as it may have tokens."""
        dice, starts = self._dice, self._starts[number]
        target = self._most if dice.random() >= SHORT_SHARE else dice.randint(2, self._most)
        first, end = 0, len(starts) - 1
        while first < end:
            last = min(bisect_left(starts, starts[first] + target, first + 1), end)
            middle = first + 1 if last == first + 1 else dice.randint(first + 1, last - 1)
            self.rows.extend((starts[first], starts[middle]))
            if self._is_random(alone=last == first + 1):
                self._add_random(number, target - (starts[middle] - starts[first]))
                first = middle  # what was to follow is not used yet
            else:
                self.rows.extend((starts[middle], starts[last], 0))
                first = last

    def _is_random(self, *, alone: bool) -> bool:
        """Decide by the flip of a coin; but nothing can follow a sentence that is left alone.

        For each of those, the next pair that leaves a choice is one of sentences in a row, so that
        both kinds stay as many.
        """
        if alone:
            self._owed += 1
            return True
        if self._owed:
            self._owed -= 1
            return False
        return self._dice.random() < 0.5

    def _add_random(self, number: int, length: int) -> None:
        """Add some sentences of any other document."""
        other = self._dice.randrange(len(self._starts) - 1)
        starts = self._starts[other + (other >= number)]
        end = len(starts) - 1
        first = self._dice.randrange(end)
        last = min(bisect_left(starts, starts[first] + length, first + 1), end)
        self.rows.extend((starts[first], starts[last], 1))


def _truncate(pairs: NDArray[np.int64], most: int, numbers: np.random.Generator) -> None:
    """Cut pairs that are too long: tokens of the longer part, at random from its front or end."""
    lengths = pairs[:, [A_END, B_END]] - pairs[:, [A_FIRST, B_FIRST]]
    shorter = np.minimum(lengths[:, 0], lengths[:, 1])
    # What the longer may have: what the shorter leaves, or a half; of an odd number, A the more.
    halves = np.array([(most + 1) // 2, most // 2])
    kept = np.minimum(lengths, np.maximum(most - shorter[:, None], halves))
    too_long = lengths.sum(axis=1) > most
    cut = np.where(too_long[:, None], lengths - kept, 0)
    front = numbers.binomial(cut, 0.5)
    pairs[:, [A_FIRST, B_FIRST]] += front
    pairs[:, [A_END, B_END]] -= cut - front
