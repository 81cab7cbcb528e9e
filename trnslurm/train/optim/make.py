"""Makes the optimizer of a recipe."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.optim.optimizer import OPTIMIZERS, UNCLIPPED, GlobalOptimizer, OptimizerSpec
from trnslurm.train.settings import OptimizerSettings

_CLASSES: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "sgd": torch.optim.SGD,
}


def make_optimizer(
    settings: OptimizerSettings,
    device: Device,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    zero1: bool = True,
    precision: str = "fp32_copy",
) -> GlobalOptimizer:
    """Make the optimizer of the settings.

    ZeRO-1 exists on XLA devices only; other devices ignore zero1 and reduce gradients. Matrices
    decay; biases and layer norms, which are vectors, do not.
    """
    name = settings.optimizer
    if zero1 and (name == "lamb" or precision == "fp32_state"):  # a job declares it: REFUSED
        raise TrainError(f"{name} with {precision} does not go with ZeRO-1: take adamw, fp32_copy")
    spec = make_spec(settings, dict(named_parameters), precision=precision)
    if device.torch_device.type != "xla":
        return DataParallel(device, spec)
    # Imported here: not every node has torch_xla.
    from trnslurm.train.optim import xla

    return xla.Zero1(device, spec) if zero1 else xla.XlaDataParallel(device, spec)


def make_spec(
    settings: OptimizerSettings,
    named: Mapping[str, nn.Parameter],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str = "fp32_copy",
) -> OptimizerSpec:
    """Return the spec of the settings' optimizer; `shapes` are the whole shapes of divided ones."""
    name = settings.optimizer
    shapes = shapes or {name: parameter.shape for name, parameter in named.items()}
    matrices = [parameter for name, parameter in named.items() if len(shapes[name]) > 1]
    vectors = [parameter for name, parameter in named.items() if len(shapes[name]) <= 1]
    decays = ((matrices, settings.weight_decay), (vectors, 0.0))
    moments = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return OptimizerSpec(
        named=named,
        groups=[{"params": each, "weight_decay": decay} for each, decay in decays if each],
        kinds=OPTIMIZERS[name],
        cls=_CLASSES[name],
        options={} if name == "sgd" else moments,
        max_norm=settings.max_norm or UNCLIPPED,
        precision=precision,
    )
