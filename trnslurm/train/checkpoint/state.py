"""The training state, as a job updates it and as checkpoints save it: rows of named tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trnslurm.train.devices.device import Device

Read = Callable[[str, str, range], Tensor]
"""Returns rows of a saved tensor by name and kind, on the host and in the type it was saved in."""


@dataclass(frozen=True)
class TensorShard:
    """The part of one tensor of the state that one worker saves."""

    name: str
    """The parameter's name."""
    kind: str
    """`parameter`, or a state that the optimizer keeps for it (exp_avg, …)."""
    rows: range
    tensor: Tensor
    """On the device. It may have other rows or ZeRO's padding before and after these rows."""
    start: int = 0
    """Where in the tensor the rows begin."""


@dataclass(frozen=True)
class OwnState:
    """The state of a job's own optimizers. When it is saved, its tensors are among the shards."""

    of: dict[str, dict[str, Any]]
    """The state of each parameter, by name: tensors of any shape, numbers, strings and None."""
    groups: list[list[dict[str, Any]]]
    """The values in each optimizer's groups that training has changed."""


ReadOwn = Callable[[Iterable[str]], OwnState]
"""Returns the state of these parameters, on the host."""


class TrainingState(ABC):
    """Parameters, the optimizer's state of each, and the gradients of a step.

    All workers make the same calls. Summed over workers and units, the gradients must equal the
    gradient of the global batch.
    """

    _device: Device
    _shapes: dict[str, tuple[int, ...]]
    """The shape of every parameter, by name."""
    _frozen: frozenset[str]
    """The parameters that are saved but not trained."""
    _kinds: tuple[str, ...]
    """The state that the optimizer keeps for each trained parameter."""
    overlaps = False
    """Whether gradients are sent during the backward pass of a step's last unit."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that a trained parameter has in the state: parameter, exp_avg, …."""
        return ("parameter", *self._kinds)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the kinds of tensors that a parameter has in the state."""
        return ("parameter",) if name in self._frozen else self.kinds

    def owners(self) -> dict[str, int]:
        """Return which worker saves a complete parameter and its state, if not by rows."""
        return {}

    def own_state(self) -> OwnState | None:
        """Return what this worker saves besides the shards, or None."""
        return None

    def load_own_state(self, read: ReadOwn) -> None:
        """Load the state that own_state and the shards of any number of workers have saved."""
        raise NotImplementedError

    @property
    def frozen(self) -> list[str]:
        """The parameters that are saved but not trained."""
        return sorted(self._frozen)

    @property
    def num_frozen(self) -> int:
        """The number of values in frozen parameters."""
        return sum(math.prod(self._shapes[name]) for name in self._frozen)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the complete shape of every parameter, by name."""
        return dict(self._shapes)

    def begin(self) -> None:  # noqa: B027 - not all of them need it
        """Check what must not have changed since the state was created."""

    def own_gradients(self) -> list[Tensor] | None:
        """Return what a unit adds its gradients to, or None if a unit involves other workers."""
        return None

    def begin_last_unit(self) -> None:
        """From now on, send sums of gradients as they become complete."""
        raise NotImplementedError

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Sum the gradients over the workers, clip by the global norm, update, and zero them.

        Return their norm before clipping.
        """

    @abstractmethod
    def shards(self) -> list[TensorShard]:
        """Return this worker's part of the state as live tensors. Call it after the first step."""

    @abstractmethod
    def load(self, read: Read, *, updates: int) -> None:
        """Load a state that any number of workers saved after this many updates."""


def num_rows(shape: Sequence[int]) -> int:
    """Return the length of a tensor's first dimension; a scalar counts as one row."""
    return shape[0] if shape else 1


def own_rows(shape: Sequence[int], worker: int, workers: int) -> range:
    """Return a worker's rows of a tensor, divided as in ZeRO but without the padding at the end."""
    rows = num_rows(shape)
    each = -(-rows // workers)
    return range(min(worker * each, rows), min((worker + 1) * each, rows))


def cut_rows(tensor: Tensor, rows: range) -> tuple[Tensor, int]:
    """Return a tensor that contains these rows, and where in it they begin."""
    if tensor.device.type == "xla":
        return tensor, rows.start  # cut on the host: on the device it would take a graph
    return tensor.reshape(tensor.shape or (1,))[rows.start : rows.stop], 0


def load_whole(tensors: Mapping[str, Tensor], kind: str, read: Read) -> None:
    """Fill complete tensors in place."""
    for name, tensor in tensors.items():
        whole = read(name, kind, range(num_rows(tensor.shape))).view(tensor.shape)
        # From the host, copy_ is a transfer if the types are the same, and no graph.
        tensor.data.copy_(whole.to(tensor.dtype))
