"""The training state for saving and loading: rows of named tensors, divided over workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Read = Callable[[str, str, range], Tensor]
"""Gives rows of a saved tensor by name and kind, on the host and in the type they were saved in."""


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """The part of one tensor of the state that one worker saves."""

    name: str
    """The parameter's."""
    kind: str
    """parameter, or a state that the optimizer keeps for it (exp_avg, …)."""
    rows: range
    tensor: Tensor
    """On the device; other rows, or ZeRO's padding, may come before and after."""
    start: int = 0
    """Where in the tensor the rows begin."""


class TrainingState(Protocol):
    """What a checkpoint contains: parameters, and the optimizer's state of each."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that there are of each parameter: parameter, exp_avg, …."""

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name."""

    def shards(self) -> list[TensorShard]:
        """Return this worker's part, as live tensors; not before the first step."""

    def load(self, read: Read, *, updates: int) -> None:
        """Load a state that was saved after this many updates, by any number of workers."""


def num_rows(shape: Sequence[int]) -> int:
    """Return the length of a tensor's first dimension; a scalar counts as one row."""
    return shape[0] if shape else 1


def own_rows(shape: Sequence[int], worker: int, workers: int) -> range:
    """Return a worker's rows of a tensor: as ZeRO divides them, less the padding at the end."""
    rows = num_rows(shape)
    each = -(-rows // workers)
    return range(min(worker * each, rows), min((worker + 1) * each, rows))
