"""One optimizer step over all workers: plain data parallelism or, on XLA devices, also ZeRO-1.

All optimizers return their state as rows of named tensors, and load a state that any number of
workers wrote.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trnslurm.train.checkpoint.manifest import shorten
from trnslurm.train.checkpoint.state import (
    Read,
    TensorShard,
    TrainingState,
    cut_rows,
    load_whole,
    own_rows,
)
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.settings import OptimizerSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state that optimizers keep per parameter, by PyTorch's names. SGD keeps none."""
ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_CLASSES: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "sgd": torch.optim.SGD,
}

UNCLIPPED = 1e30
"""A bound that scales no gradient, not even in bf16; the norm is still computed.

It is not infinity, which XLA compilers may treat differently.
"""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """What an optimizer is made from, for any device and any way to divide its state."""

    named: Mapping[str, nn.Parameter]
    """The parameters that are trained, in the model's order."""
    groups: list[dict[str, Any]]
    """These parameters in groups, as PyTorch's optimizers accept them."""
    kinds: tuple[str, ...]
    """The state that the optimizer keeps per parameter."""
    cls: Callable[..., torch.optim.Optimizer]
    """PyTorch's optimizer."""
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that are saved but not trained."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's options."""
    max_norm: float = UNCLIPPED
    precision: str = "fp32_copy"
    """OptimizerPrecision in settings.py."""

    def make(
        self, lr: float | Tensor, *, adam: Mapping[str, Any], **more: Any
    ) -> torch.optim.Optimizer:
        """Make PyTorch's optimizer; the options `adam` are only for Adam and AdamW."""
        if self.cls in ADAMS:
            more |= adam
        return self.cls(self.groups, lr=lr, **self.options, **more)

    def with_masters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> "OptimizerSpec":
        """Return a spec whose optimizer updates these tensors instead of the parameters."""
        groups = [{**g, "params": [masters[each] for each in g["params"]]} for g in self.groups]
        return replace(self, groups=groups)


def make_spec(
    settings: OptimizerSettings,
    tensors: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str = "fp32_copy",
) -> OptimizerSpec:
    """Return the spec of the settings' optimizer; `shapes` are the full shapes of divided tensors.

    Tensors that require no gradient are frozen.
    """
    named, frozen = _trained_and_frozen(tensors)
    moments = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return OptimizerSpec(
        named=named,
        groups=decay_matrices(named, settings.weight_decay, shapes=shapes),
        kinds=() if settings.optimizer == "sgd" else MOMENTS,
        cls=_CLASSES[settings.optimizer],
        frozen=frozen,
        options={} if settings.optimizer == "sgd" else moments,
        max_norm=settings.max_norm or UNCLIPPED,
        precision=precision,
    )


def decay_matrices(
    named: Mapping[str, nn.Parameter],
    weight_decay: float,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return parameters in two groups: matrices decay; vectors, such as biases and norms, do not.

    `shapes` are the full shapes of parameters that are divided.
    """
    shapes = shapes or {name: parameter.shape for name, parameter in named.items()}
    matrices = [parameter for name, parameter in named.items() if len(shapes[name]) > 1]
    vectors = [parameter for name, parameter in named.items() if len(shapes[name]) <= 1]
    decays = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": each, "weight_decay": decay} for each, decay in decays if each]


def own_spec(
    tensors: Mapping[str, Tensor], *, max_norm: float, precision: str = "fp32_copy"
) -> OptimizerSpec:
    """Return the spec of optimizers that the job makes."""
    named, frozen = _trained_and_frozen(tensors)
    return OptimizerSpec(
        named=named,
        groups=[{"params": list(named.values())}],
        kinds=(),
        cls=torch.optim.Optimizer,
        frozen=frozen,
        max_norm=max_norm or UNCLIPPED,
        precision=precision,
    )


def _trained_and_frozen(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Separate tensors that require a gradient from those that do not."""
    once: dict[Tensor, str] = {}
    for name, tensor in tensors.items():
        once.setdefault(tensor, name)  # tied ones are saved under the first name
    named: dict[str, Any] = {name: each for each, name in once.items() if each.requires_grad}
    if not named:
        raise TrainError(
            "every parameter of the model is frozen (requires_grad=False): leave at least one to "
            "train"
        )
    return named, {name: each for each, name in once.items() if not each.requires_grad}


class GlobalOptimizer(TrainingState):
    """An optimizer whose steps all workers take together."""

    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""

    def __init__(self, device: Device, spec: OptimizerSpec) -> None:
        self._device = device
        self._spec = spec
        self._kinds = spec.kinds
        self._parameters: list[nn.Parameter] = [p for group in spec.groups for p in group["params"]]
        names = {parameter: name for name, parameter in spec.named.items()}
        self._names = [names[parameter] for parameter in self._parameters]
        saved = {**spec.named, **spec.frozen}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self._frozen = frozenset(spec.frozen)
        # Made once, and zeroed in place by step(): a gradient that appears in the first backward
        # pass would make its graph, and the optimizer's, differ from the next.
        self._gradients = self._make_gradients()

    def _make_gradients(self) -> list[Tensor]:
        """Give every parameter a gradient of zero; return the gradients."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def begin(self) -> None:
        """Refuse a change of requires_grad since this optimizer was made."""
        changed = [name for name, each in self._spec.named.items() if not each.requires_grad]
        changed += [name for name, each in self._spec.frozen.items() if each.requires_grad]
        if changed:
            raise TrainError(
                f"{', '.join(shorten(changed))}: requires_grad was changed after make_optimizer: "
                "change it before that, or it has no effect"
            )

    def shards(self) -> list[TensorShard]:
        """Return this worker's part of the state; copy the tensors before the next step."""
        shards = []
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            state = self._base.state[holder]
            tensors = {"parameter": self._saved(parameter, holder)}
            tensors |= {kind: state[kind] for kind in self._kinds}
            for kind, tensor in tensors.items() if rows else ():
                own, start = self._own_part(tensor, rows)
                shards.append(TensorShard(name, kind, rows, own, start))
        return shards + self._frozen_shards()

    def _frozen_shards(self) -> list[TensorShard]:
        """Return this worker's rows of the frozen tensors."""
        return [
            TensorShard(name, "parameter", rows, *cut_rows(frozen, rows))
            for name, frozen in self._spec.frozen.items()
            if (rows := own_rows(frozen.shape, self._device.rank, self._device.world))
        ]

    def _load_frozen(self, read: Read) -> None:
        """Fill the frozen tensors in place."""
        load_whole(self._spec.frozen, "parameter", read)

    @abstractmethod
    def _holders(self) -> list[Tensor]:
        """Return the tensors that the inner optimizer updates, one for each parameter."""

    def _saved(self, parameter: Tensor, holder: Tensor) -> Tensor:
        """Return the values of a parameter to save: the most precise ones that exist."""
        return holder.detach()

    @abstractmethod
    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        """Return the tensor with this worker's rows of a holder or its state, and their start."""

    def _triples(self) -> Iterable[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._holders(), strict=True)


def update(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Take a step of PyTorch's optimizer at one learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
