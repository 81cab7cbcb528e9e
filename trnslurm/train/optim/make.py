"""Makes the optimizer that a recipe asks for."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.optim.optimizer import OPTIMIZERS, UNCLIPPED, GlobalOptimizer
from trnslurm.train.settings import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings,
    device: Device,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    zero1: bool = True,
    precision: str = "fp32_copy",
) -> GlobalOptimizer:
    """Make the optimizer that the settings ask for.

    ZeRO-1 exists on XLA devices; others reduce gradients plainly, whatever is asked for. Matrices
    decay; biases and layer norms, which are vectors, do not.
    """
    name = settings.optimizer
    if zero1 and (name == "lamb" or precision == "fp32_state"):  # a job declares it: REFUSED
        raise TrainError(f"{name} with {precision} does not go with ZeRO-1: take adamw, fp32_copy")
    named = dict(named_parameters)
    matrices = [parameter for parameter in named.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in named.values() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {}
    if name != "sgd":
        cls = Lamb if name == "lamb" else torch.optim.AdamW
        options = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    max_norm = settings.max_norm or UNCLIPPED
    return _choose(device, zero1)(
        device, groups, named, OPTIMIZERS[name], cls, options, max_norm, precision
    )


def _choose(device: Device, zero1: bool) -> Callable[..., GlobalOptimizer]:
    if device.torch_device.type != "xla":
        return DataParallel
    # Imported where they are used: not every node has torch_xla.
    if zero1:
        from trnslurm.train.optim.xla import Zero1

        return Zero1
    from trnslurm.train.optim.xla import XlaDataParallel

    return XlaDataParallel
