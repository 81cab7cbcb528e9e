"""One optimizer step over all workers: plain data parallelism, or on XLA devices ZeRO-1 too.

All return their state as rows of named tensors, and load a state that any number of workers wrote.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.checkpoint.state import TensorShard, TrainingState, own_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.settings import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state that optimizers keep per parameter, by PyTorch's names; SGD keeps none."""
ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_CLASSES: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "sgd": torch.optim.SGD,
}

UNCLIPPED = 1e30
"""A bound that scales no gradient, in bf16 either; the norm is still computed.

Not infinity, which compilers of XLA may treat differently.
"""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What an optimizer is made from, whatever the device and the way to divide its state."""

    named: Mapping[str, nn.Parameter]
    """All parameters, in the model's order."""
    groups: list[dict[str, Any]]
    """The parameters in groups, as PyTorch's optimizers take them."""
    kinds: tuple[str, ...]
    """The state that the optimizer keeps per parameter."""
    cls: Callable[..., torch.optim.Optimizer]
    """PyTorch's optimizer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that optimizer."""
    max_norm: float = UNCLIPPED
    precision: str = "fp32_copy"
    """OptimizerPrecision in settings.py."""

    def make(
        self, lr: float | Tensor, *, adam: Mapping[str, Any], **more: Any
    ) -> torch.optim.Optimizer:
        """Make PyTorch's optimizer; the options `adam` are for Adam and AdamW only."""
        if self.cls in ADAMS:
            more |= adam
        return self.cls(self.groups, lr=lr, **self.options, **more)

    def with_masters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> "OptimizerSpec":
        """Return a spec whose optimizer updates these tensors instead of the parameters."""
        groups = [{**g, "params": [masters[each] for each in g["params"]]} for g in self.groups]
        return replace(self, groups=groups)


def make_spec(
    settings: OptimizerSettings,
    named: Mapping[str, nn.Parameter],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str = "fp32_copy",
) -> OptimizerSpec:
    """Return the spec of the settings' optimizer; `shapes` are the whole shapes of divided ones.

    Matrices decay; biases and layer norms, which are vectors, do not.
    """
    name = settings.optimizer
    shapes = shapes or {name: parameter.shape for name, parameter in named.items()}
    matrices = [parameter for name, parameter in named.items() if len(shapes[name]) > 1]
    vectors = [parameter for name, parameter in named.items() if len(shapes[name]) <= 1]
    decays = ((matrices, settings.weight_decay), (vectors, 0.0))
    moments = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return OptimizerSpec(
        named=named,
        groups=[{"params": each, "weight_decay": decay} for each, decay in decays if each],
        kinds=() if name == "sgd" else MOMENTS,
        cls=_CLASSES[name],
        options={} if name == "sgd" else moments,
        max_norm=settings.max_norm or UNCLIPPED,
        precision=precision,
    )


class GlobalOptimizer(TrainingState):
    """A step that all workers take together."""

    def __init__(self, device: Device, spec: OptimizerSpec) -> None:
        self._device = device
        self._spec = spec
        self._kinds = spec.kinds
        self._parameters: list[nn.Parameter] = [p for group in spec.groups for p in group["params"]]
        names = {parameter: name for name, parameter in spec.named.items()}
        self._shapes = {names[parameter]: tuple(parameter.shape) for parameter in self._parameters}
        # Made once and zeroed in place: a gradient that appears in the first backward pass would
        # make its graph, and the optimizer's, differ from the next.
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

    def shards(self) -> list[TensorShard]:
        """Return this worker's part of the state; copy the tensors before the next step.

        A model's buffers are no state here, because they never change.
        """
        shards = []
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            state = self._base.state[holder]
            tensors = {"parameter": self._saved(parameter, holder)}
            tensors |= {kind: state[kind] for kind in self._kinds}
            for kind, tensor in tensors.items() if rows else ():
                own, start = self._own_part(tensor, rows)
                shards.append(TensorShard(name, kind, rows, own, start))
        return shards

    @abstractmethod
    def _holders(self) -> list[Tensor]:
        """Return the tensors that the optimizer inside updates, one for each parameter."""

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        """Return the values of a parameter to save: the most precise that exist."""
        return holder.detach()

    @abstractmethod
    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        """Return the tensor with this worker's rows of a holder or its state, and their start."""

    def _triples(self) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._shapes, self._parameters, self._holders(), strict=True)
