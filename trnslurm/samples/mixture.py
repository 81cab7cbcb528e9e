"""A mix of sources: which source and which sample is at each position of the stream.

The sources are the leaves of a binary tree. Each node sends its n-th sample left or right so that
the number of samples on the left is its exact share, rounded. So no count is random, and any
position can be computed without the positions before it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.samples.order import derive_seed, indices_at

# Shares are rounded to a millionth if their common denominator would be larger.
_FINEST = 10**6


@dataclass(frozen=True)
class _Rule:
    """How a node divides its samples from number `begin` on: `share` of every `whole` go left."""

    begin: int
    left_before: int
    share: int
    whole: int
    carry: Fraction
    """How much the left side is owed, at least 0 and less than 1."""

    def left(self, n: Any) -> Any:
        """Return how many of the node's first n samples go to the left."""
        rest = math.floor(self.carry * self.whole)
        return self.left_before + ((n - self.begin) * self.share + rest) // self.whole

    def then(self, n: int, share: int, whole: int) -> _Rule:
        """Return the rule from the node's n-th sample on; it carries over what this one owes."""
        owed = (n - self.begin) * Fraction(self.share, self.whole) + self.carry
        gone = math.floor(owed)
        return _Rule(n, self.left_before + gone, share, whole, owed - gone)


class Mix:
    """An endless mix of sources, whose weights may change at given steps."""

    def __init__(
        self,
        sources: Mapping[str, tuple[int, float]],
        *,
        global_batch: int,
        seed: int,
        schedule: Sequence[tuple[int, Mapping[str, float]]],
    ) -> None:
        _check(len(sources) > 0, "sources is empty: pass at least one source")
        _check(global_batch >= 1, f"global_batch is {global_batch}: it must be 1 or more")
        self.names = list(sources)
        self.sizes = {name: count for name, (count, _) in sources.items()}
        for name, count in self.sizes.items():
            _check(count >= 1, f"the source {name!r} has {count} samples: remove it")
        self.global_batch = global_batch
        self._seed = seed
        weights = {name: weight for name, (_, weight) in sources.items()}
        changes = [(0, weights), *schedule]
        steps = [step for step, _ in changes]
        _check(all(a < b for a, b in zip(steps, steps[1:])),
               f"the schedule's steps are {steps[1:]}: they must be ascending, from 1")  # fmt: skip
        self._begins = [step * global_batch for step in steps]
        self._shares = [self._whole(weights) for _, weights in changes]
        self._rules = self._all_rules()

    def facts(self) -> dict[str, Any]:
        """Return everything that determines which samples a step has."""
        steps = [begin // self.global_batch for begin in self._begins]
        return {"sources": self.sizes, "shares": list(zip(steps, self._shares))}

    def shares(self, step: int) -> dict[str, float]:
        """Return each source's share of the next step after `step` completed steps."""
        found = self._shares[bisect.bisect_right(self._begins, step * self.global_batch) - 1]
        return {name: part / sum(found) for name, part in zip(self.names, found)}

    def report(self, step: int) -> dict[str, dict[str, float]]:
        """Return what each source has contributed after `step` completed steps.

        `samples` and `share` are exact counts. `epochs` is how often each sample of the source was
        seen. `rate` is above 1 if the source is sampled more often than the average sample.
        """
        position = step * self.global_batch
        counts, average = self.counts(position), position / sum(self.sizes.values())
        found = {}
        for name, count in counts.items():
            epochs = count / self.sizes[name]
            found[name] = {
                "samples": count,
                "share": count / position if position else 0.0,
                "epochs": epochs,
                "rate": epochs / average if position else 0.0,
            }
        return found

    def counts(self, position: int) -> dict[str, int]:
        """Return how many of the stream's first samples come from each source."""
        rules = self._rules[bisect.bisect_right(self._begins, position) - 1]
        counts = self._count(rules, position)
        return dict(zip(self.names, counts))

    def samples_at(self, positions: NDArray[np.int64]) -> list[tuple[str, int]]:
        """Return the source and index of the samples at these positions."""
        source = np.zeros(len(positions), np.int64)
        nth = np.zeros(len(positions), np.int64)
        segments = np.searchsorted(self._begins, positions, side="right") - 1
        for segment in np.unique(segments):
            chosen = np.flatnonzero(segments == segment)
            self._place(self._rules[segment], chosen, positions[chosen], source, nth)
        indices = np.zeros(len(positions), np.int64)
        for number, name in enumerate(self.names):
            of_it = np.flatnonzero(source == number)
            seed = derive_seed(self._seed, number)
            indices[of_it] = indices_at(nth[of_it], count=self.sizes[name], seed=seed)
        return [(self.names[s], i) for s, i in zip(source.tolist(), indices.tolist())]

    def _whole(self, weights: Mapping[str, float]) -> list[int]:
        """Return weights as integers, in the order of the sources."""
        if unknown := [name for name in weights if name not in self.sizes]:
            _check(False, f"the schedule names {unknown[0]!r}, which is not a source: "
                   f"the sources are {', '.join(self.names)}")  # fmt: skip
        given = [weights.get(name, 0) for name in self.names]
        _check(all(0 <= w < math.inf for w in given) and sum(given) > 0,
               f"the weights are {given}: use positive numbers or 0, but not only 0")  # fmt: skip
        exact = [Fraction(str(w)) for w in given]
        whole = math.lcm(*(w.denominator for w in exact))
        parts = [int(w * whole) for w in exact]
        parts = [part // math.gcd(*parts) for part in parts]
        if sum(parts) > _FINEST:
            total = sum(exact)
            parts = [round(w / total * _FINEST) for w in exact]
        return parts

    def _all_rules(self) -> list[dict[tuple[int, int], _Rule]]:
        """Return the rule of each node, from each change of the weights on.

        A node covers the sources from its first number up to, but not including, its last.
        """
        found: list[dict[tuple[int, int], _Rule]] = []
        for begin, parts in zip(self._begins, self._shares):
            before = found[-1] if found else {}
            rules: dict[tuple[int, int], _Rule] = {}
            left = [(0, len(parts), begin)]
            while left:
                first, end, n = left.pop()
                if end - first < 2:
                    continue
                middle = (first + end) // 2
                share, whole = sum(parts[first:middle]), sum(parts[first:end]) or 1
                old = before.get((first, end), _Rule(0, 0, 0, 1, Fraction(1, 2)))
                rule = rules[first, end] = old.then(n, share, whole)
                left += [(first, middle, rule.left_before), (middle, end, n - rule.left_before)]
            found.append(rules)
        return found

    def _count(self, rules: Mapping[tuple[int, int], _Rule], position: int) -> list[int]:
        counts = [0] * len(self.names)
        left = [(0, len(counts), position)]
        while left:
            first, end, n = left.pop()
            if end - first < 2:
                counts[first] = n
                continue
            middle = (first + end) // 2
            lefts = rules[first, end].left(n)
            left += [(first, middle, lefts), (middle, end, n - lefts)]
        return counts

    def _place(
        self,
        rules: Mapping[tuple[int, int], _Rule],
        chosen: NDArray[np.int64],
        n: NDArray[np.int64],
        source: NDArray[np.int64],
        nth: NDArray[np.int64],
    ) -> None:
        """Set the source of each chosen position, and how many of that source came before it."""
        left = [(0, len(self.names), chosen, n)]
        while left:
            first, end, chosen, n = left.pop()
            if end - first < 2:
                source[chosen], nth[chosen] = first, n
                continue
            middle = (first + end) // 2
            lefts = rules[first, end].left(n)
            goes_left = rules[first, end].left(n + 1) > lefts
            left.append((first, middle, chosen[goes_left], lefts[goes_left]))
            left.append((middle, end, chosen[~goes_left], (n - lefts)[~goes_left]))


def mix(
    sources: Mapping[str, tuple[int, float]],
    *,
    global_batch: int,
    seed: int = 0,
    schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None,
) -> Mix:
    """Return a mix of sources, each with its number of samples and its weight.

    Each entry of the schedule gives new weights that apply after a number of steps.
    """
    return Mix(sources, global_batch=global_batch, seed=seed, schedule=schedule or ())


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"trnslurm.mix: {otherwise}")
