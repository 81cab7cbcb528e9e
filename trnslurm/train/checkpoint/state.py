"""What is trained, as a job steps it and as checkpoints save it: rows of named tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trnslurm.train.devices.device import Device

Read = Callable[[str, str, range], Tensor]
"""Gives rows of a saved tensor by name and kind, on the host and in the type they were saved in."""


@dataclass(frozen=True)
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


class TrainingState(ABC):
    """Parameters, the optimizer's state of each, and the gradients of a step.

    All workers make the same calls. The gradients must add up, over workers and units, to the
    gradient of the global batch.
    """

    _device: Device
    _shapes: dict[str, tuple[int, ...]]
    """The shape of every parameter, by name."""
    _frozen: frozenset[str]
    """The parameters that are saved but not trained."""
    _kinds: tuple[str, ...]
    """The state that the optimizer keeps for each parameter that is trained."""
    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that a trained parameter has in the state: parameter, exp_avg, …."""
        return ("parameter", *self._kinds)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the kinds of tensors that a parameter has in the state."""
        return ("parameter",) if name in self._frozen else self.kinds

    @property
    def frozen(self) -> list[str]:
        """The parameters that are saved but not trained."""
        return sorted(self._frozen)

    @property
    def num_frozen(self) -> int:
        """The number of values in frozen parameters."""
        return sum(math.prod(self._shapes[name]) for name in self._frozen)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name."""
        return dict(self._shapes)

    def begin(self) -> None:  # noqa: B027 - not all of them need it
        """Check what must not have changed since the state was made."""

    def begin_last_unit(self) -> None:  # noqa: B027 - not all of them use it
        """Note that a step's last gradients come next: their sums may be sent early."""

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Clip by the global norm and update; return the norm of the gradients before clipping."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Set the gradients to zero."""

    @abstractmethod
    def shards(self) -> list[TensorShard]:
        """Return this worker's part of the state, as live tensors; not before the first step."""

    @abstractmethod
    def load(self, read: Read, *, updates: int) -> None:
        """Load a state that any number of workers saved after this many updates."""

    def _update(self, lr: float) -> None:
        """Update with the optimizer inside."""
        rate = self._rate(lr)
        for group in self._base.param_groups:
            group["lr"] = rate
        self._base.step()

    def _rate(self, lr: float) -> Tensor | float:
        """Return a learning rate as the optimizer inside takes it."""
        return lr


def num_rows(shape: Sequence[int]) -> int:
    """Return the length of a tensor's first dimension; a scalar counts as one row."""
    return shape[0] if shape else 1


def own_rows(shape: Sequence[int], worker: int, workers: int) -> range:
    """Return a worker's rows of a tensor: as ZeRO divides them, less the padding at the end."""
    rows = num_rows(shape)
    each = -(-rows // workers)
    return range(min(worker * each, rows), min((worker + 1) * each, rows))
