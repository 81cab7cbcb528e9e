"""The interface of a sharded model, and what its strategies share."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trnslurm.contract.rundir import STRATEGY
from trnslurm.train.checkpoint.state import TensorShard, TrainingState, own_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.optimizer import MOMENTS, OptimizerSpec, make_spec
from trnslurm.train.plan import JobPlan
from trnslurm.train.sharded.settings import ShardedSettings


@dataclass(frozen=True)
class ShardingRequest:
    """What a strategy gets in order to divide a model."""

    plan: JobPlan
    settings: ShardedSettings
    device: Device
    file: dict[str, Any]
    """The strategy's own settings, which agree with the plan."""
    blueprint: nn.Module
    """The model without memory: names and shapes."""
    make_model: Callable[[], nn.Module]


class Sharded(TrainingState):
    """A model divided over all workers, and its optimizer.

    All workers run the same number of units. Each strategy decides when it reduces gradients.
    """

    _base: torch.optim.Optimizer
    """PyTorch's optimizer inside."""
    model: nn.Module
    """The module to run. A parameter is complete only while one of its layers is computing."""

    def __init__(self, request: ShardingRequest) -> None:
        self._device = request.device
        self._shapes = shapes_of(request.blueprint)
        named = request.blueprint.named_parameters()
        self._frozen = frozenset(name for name, each in named if not each.requires_grad)
        self._kinds = () if request.settings.optimizer == "sgd" else MOMENTS

    @property
    def num_parameters(self) -> int:
        """The number of parameters in the whole model."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of targets; a target of -100 is ignored."""
        loss: Tensor = self._device.compiled(_sum_losses)(logits, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add a unit's gradient, given the unit's share of the loss."""
        # FSDP and DeepSpeed average over the workers: data/units.py says why it is undone.
        scaled: Any = loss * self._device.world
        scaled.backward()

    def _shard(self, name: str, kind: str, whole: Tensor) -> list[TensorShard]:
        """Return a copy of this worker's rows of a whole tensor, so that the rest can be freed."""
        rows = own_rows(whole.shape, self._device.rank, self._device.world)
        own = whole.reshape(whole.shape or (1,))[rows.start : rows.stop].clone()
        return [TensorShard(name, kind, rows, own)] if rows else []

    def _check_world(self, found: int) -> None:
        """Refuse to train separate copies: each library finds the other workers on its own."""
        if found != self._device.world:
            raise TrainError(
                f"{type(self).__name__} found {found} workers, but {self._device.world} are "
                "running: each would train a separate copy"
            )


def _sum_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def spec_of(request: ShardingRequest, named: Iterable[tuple[str, nn.Parameter]]) -> OptimizerSpec:
    """Return the spec of the optimizer that updates this worker's parts, given by name."""
    return make_spec(request.settings, dict(named), shapes=shapes_of(request.blueprint))


def layers_to_wrap(request: ShardingRequest) -> set[type[nn.Module]]:
    """Find the classes of layers that are gathered one by one."""
    names = request.file.get("fsdp_transformer_layer_cls_to_wrap")
    if not isinstance(names, list) or not names:
        raise TrainError(
            f"{STRATEGY}: fsdp_transformer_layer_cls_to_wrap must name classes of layers"
        )
    there = {type(module).__name__: type(module) for module in request.blueprint.modules()}
    for name in names:
        if name not in there:
            raise TrainError(
                f"{STRATEGY}: fsdp_transformer_layer_cls_to_wrap: the model has no {name}"
            )
    return {there[name] for name in names}


def own_part(whole: Iterable[Tensor], length: int, worker: int) -> Tensor:
    """Cut a worker's part of this length out of tensors laid end to end."""
    flat = torch.cat([tensor.reshape(-1).float() for tensor in whole])
    part = flat[worker * length : (worker + 1) * length]
    return torch.nn.functional.pad(part, (0, length - len(part)))


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of these shapes from the joined parts of all workers."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = torch.split(flat[: sum(sizes)], sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
