"""How often each sample was seen in given steps, recomputed from what a run has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.samples.batches import Batches
from trnslurm.samples.order import indices_at

_BLOCK = 1 << 20


def positions(facts: Mapping[str, Any], steps: range) -> tuple[int, int]:
    """Return the range of positions of these steps, which count from 1."""
    size = facts["global_batch"]
    if facts.get("joined") or facts.get("mix"):
        return (steps.start - 1) * size, (steps.stop - 1) * size
    order = Batches(
        facts["samples"], global_batch=size, micro_batch=None, seed=0, epochs=None, steps=None,
        start=0, shuffle=True, drop_last=facts["drop_last"], rank=0, world_size=1,
    )  # fmt: skip
    _, first, _ = order.span(steps.start)
    _, last, count = order.span(steps.stop - 1)
    return first, last + count


def times_seen(facts: Mapping[str, Any], stretches: Iterable[range]) -> NDArray[np.int32]:
    """Return how often each sample was seen in these ranges of steps."""
    count = facts["samples"]
    found = np.zeros(count, np.int32)
    for steps in stretches:
        for first, end in _parts(facts, steps):
            for begin in range(first, end, _BLOCK):
                places = np.arange(begin, min(begin + _BLOCK, end))
                if facts.get("shuffle", True):
                    seen = indices_at(places, count=count, seed=facts["seed"])
                else:
                    seen = places % count
                found += np.bincount(seen, minlength=count).astype(np.int32)
    return found


def _parts(facts: Mapping[str, Any], steps: range) -> Iterable[tuple[int, int]]:
    """Yield the start and end positions of steps; drop_last leaves gaps between epochs."""
    if not facts.get("drop_last"):
        yield positions(facts, steps)
        return
    each = facts["samples"] // facts["global_batch"]
    for epoch in range((steps.start - 1) // each, (steps.stop - 2) // each + 1):
        inside = range(max(steps.start, epoch * each + 1), min(steps.stop, (epoch + 1) * each + 1))
        yield positions(facts, inside)
