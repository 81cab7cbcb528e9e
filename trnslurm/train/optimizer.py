"""One optimizer step over all workers: plain data parallelism, or on XLA devices ZeRO-1 too.

All expect gradients that add up, over workers and units, to the gradient of the global batch; all
clip by the global norm and return that norm as it was before. All give their state, for saving, as
rows of named tensors, and take it back whatever number of workers wrote it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.lamb import Lamb
from trnslurm.train.state import Read, Shard, own_rows

OPTIMIZERS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
}
"""What each keeps of every parameter, by the names that PyTorch gives it."""

PRECISIONS = ("fp32_copy", "fp32_state", "as_model")
"""Where parameters have fewer bits than fp32: the optimizer updates fp32 copies of them; or has
copies for a step only and keeps its state in fp32; or does all in the parameters' own type."""


class GlobalOptimizer(ABC):
    """A step that all workers take together."""

    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""

    def __init__(
        self, device: Device, groups: list[dict[str, Any]], names: list[str], kinds: Sequence[str]
    ) -> None:
        self._device = device
        self._names = names
        self._kinds = kinds
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        # Made once and zeroed in place: a gradient that appears in the first backward pass would
        # make its graph, and that of the optimizer, differ from the next.
        self._gradients = self._make_gradients()

    def _make_gradients(self) -> list[Tensor]:
        """Give every parameter a gradient of zero, and return all of them."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def zero_grad(self) -> None:
        """Set the gradients to zero in place."""
        for gradient in self._gradients:
            gradient.zero_()

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Reduce and clip the gradients, update the parameters, give the norm before clipping."""

    def shards(self) -> list[Shard]:
        """Give this worker's part of the state, parameters included; not before the first step.

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
                shards.append(Shard(name=name, kind=kind, rows=rows, tensor=own, start=start))
        return shards

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shape of every parameter, by name."""
        names = zip(self._names, self._parameters, strict=True)
        return {name: tuple(parameter.shape) for name, parameter in names}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that the state has for each parameter."""
        return ("parameter", *self._kinds)

    @abstractmethod
    def load(self, read: Read, *, updates: int) -> None:
        """Go on from a saved state, which has seen so many steps; parameters are set too."""

    @abstractmethod
    def _holders(self) -> list[Tensor]:
        """Give the tensors that the optimizer inside updates, one for each parameter."""

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        """Give the values of a parameter that are saved: of all that there are, the finest."""
        return holder.detach()

    @abstractmethod
    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        """Give what has this worker's rows of a holder or its state, and where they begin."""

    def _triples(self) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._holders(), strict=True)


def make_optimizer(
    name: str,
    device: Device,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    max_norm: float,
    zero1: bool = True,
    precision: str = "fp32_copy",
    **adam: Any,
) -> GlobalOptimizer:
    """Make the optimizer for a device; betas and eps (adam) are for adamw and lamb.

    ZeRO-1 exists on XLA devices; others reduce gradients plainly, whatever is asked for. Matrices
    decay; biases and layer norms, which are vectors, do not. The precision is one of PRECISIONS.
    """
    _check_choice(name, zero1, precision)
    matrices: dict[str, nn.Parameter] = {}
    vectors: dict[str, nn.Parameter] = {}
    for key, parameter in named_parameters:
        (matrices if parameter.dim() > 1 else vectors)[key] = parameter
    names = [*matrices, *vectors]
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.values()), "weight_decay": weight_decay},
        {"params": list(vectors.values()), "weight_decay": 0.0},
    ]
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {}
    if name == "adamw":
        cls, options = torch.optim.AdamW, adam
    elif name == "lamb":
        cls, options = Lamb, adam
    strategy = _strategy(device, zero1)
    return strategy(device, groups, names, OPTIMIZERS[name], cls, options, max_norm, precision)


def _check_choice(name: str, zero1: bool, precision: str) -> None:
    if name not in OPTIMIZERS:
        raise TrainError(f"train.optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
    if precision not in PRECISIONS:
        raise TrainError(
            f"train.optimizer_precision: {precision!r} is not one of {', '.join(PRECISIONS)}"
        )
    if name == "lamb" and zero1:
        raise TrainError(
            "train.optimizer: lamb needs the norms of whole parameters, but with ZeRO-1 a worker "
            "has parts of them: set train.zero1=false, or take adamw"
        )
    if precision != "fp32_copy" and zero1:
        raise TrainError(
            f"train.optimizer_precision: {precision} is not to be had with ZeRO-1, which divides "
            "an fp32 copy over the workers: set train.zero1=false, or take fp32_copy"
        )


def _strategy(device: Device, zero1: bool) -> Callable[..., GlobalOptimizer]:
    # Each imported where it is used: all build on this module, and some on torch_xla.
    if device.torch_device.type != "xla":
        from trnslurm.train.data_parallel import DataParallel

        return DataParallel
    if zero1:
        from trnslurm.train.zero1 import Zero1

        return Zero1
    from trnslurm.train.xla_data_parallel import XlaDataParallel

    return XlaDataParallel
