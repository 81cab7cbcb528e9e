"""One optimizer step over all workers: plain data parallelism, or on XLA devices ZeRO-1 too.

All expect gradients that add up, over workers and units, to the gradient of the global batch; all
clip by the global norm and return that norm as it was before. All give their state, for saving, as
rows of named tensors, and take it back whatever number of workers wrote it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.checkpoint.state import Read, TensorShard, own_rows
from trnslurm.train.devices.device import Device

OPTIMIZERS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
}
"""The state that each keeps per parameter, by PyTorch's names."""

UNCLIPPED = 1e30
"""A bound of the norm that scales no gradient, in bf16 too; the norm is known all the same.

Not infinity, for which compilers of XLA have options of their own.
"""


class GlobalOptimizer(ABC):
    """A step that all workers take together."""

    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""

    def __init__(
        self,
        device: Device,
        groups: list[dict[str, Any]],
        named: dict[str, nn.Parameter],
        kinds: Sequence[str],
    ) -> None:
        """Take groups of parameters as PyTorch's optimizers do, and all by name as a model does."""
        self._device = device
        self._kinds = kinds
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        names = {parameter: name for name, parameter in named.items()}
        self._names = [names[parameter] for parameter in self._parameters]
        self._in_order = list(named.values())
        # Made once and zeroed in place: a gradient that appears in the first backward pass would
        # make its graph, and that of the optimizer, differ from the next.
        self._gradients = self._make_gradients()

    def _make_gradients(self) -> list[Tensor]:
        """Give every parameter a gradient of zero; return the gradients."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def zero_grad(self) -> None:
        """Set the gradients to zero in place."""
        for gradient in self._gradients:
            gradient.zero_()

    def begin_last_unit(self) -> None:  # noqa: B027 - not all of them care
        """Learn that a step's last gradients come next: their sums may be on their way early."""

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Reduce and clip the gradients, update the parameters, return the norm before clipping."""

    def shards(self) -> list[TensorShard]:
        """Return this worker's part of the state, parameters included; not before the first step.

        The tensors are the live ones: they are to be copied before the next step. Of what a model
        holds besides parameters (buffers) nothing is state here: it never changes.
        """
        shards = []
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            state = self._base.state[holder]
            tensors = {"parameter": self._saved(parameter, holder)}
            tensors |= {kind: state[kind] for kind in self._kinds}
            for kind, tensor in tensors.items() if rows else ():
                own, start = self._own_part(tensor, rows)
                shards.append(TensorShard(name=name, kind=kind, rows=rows, tensor=own, start=start))
        return shards

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name."""
        names = zip(self._names, self._parameters, strict=True)
        return {name: tuple(parameter.shape) for name, parameter in names}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that the state has for each parameter."""
        return ("parameter", *self._kinds)

    @abstractmethod
    def load(self, read: Read, *, updates: int) -> None:
        """Load a saved state, which has seen this many steps; parameters are set too."""

    @abstractmethod
    def _holders(self) -> list[Tensor]:
        """Return the tensors that the optimizer inside updates, one for each parameter."""

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        """Return the values of a parameter that are saved: the most precise ones there are."""
        return holder.detach()

    @abstractmethod
    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        """Return what has this worker's rows of a holder or its state, and where they begin."""

    def _triples(self) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._holders(), strict=True)
