"""Makes the optimizer that a recipe asks for."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.optim.optimizer import OPTIMIZERS, GlobalOptimizer
from trnslurm.train.settings import OptimizerSettings

OPTIMIZER_PRECISIONS = ("fp32_copy", "fp32_state", "as_model")
"""Where parameters have fewer bits than fp32: the optimizer updates fp32 copies of them; or has
copies for a step only and keeps its state in fp32; or does all in the parameters' own type."""


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
    _check_choice(name, zero1, precision)
    matrices: dict[str, nn.Parameter] = {}
    vectors: dict[str, nn.Parameter] = {}
    for key, parameter in named_parameters:
        (matrices if parameter.dim() > 1 else vectors)[key] = parameter
    names = [*matrices, *vectors]
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.values()), "weight_decay": settings.weight_decay},
        {"params": list(vectors.values()), "weight_decay": 0.0},
    ]
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {}
    if name != "sgd":
        cls = Lamb if name == "lamb" else torch.optim.AdamW
        options = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return _choose(device, zero1)(
        device, groups, names, OPTIMIZERS[name], cls, options, settings.max_norm, precision
    )


def _check_choice(name: str, zero1: bool, precision: str) -> None:
    if name not in OPTIMIZERS:
        raise TrainError(f"train.optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
    if precision not in OPTIMIZER_PRECISIONS:
        raise TrainError(
            f"train.optimizer_precision: {precision!r} is not one of "
            f"{', '.join(OPTIMIZER_PRECISIONS)}"
        )
    if name == "lamb" and zero1:
        raise TrainError(
            "train.optimizer: lamb needs the norms of whole parameters, but with ZeRO-1 a worker "
            "has parts of them: set train.zero1=false, or take adamw"
        )
    if precision != "fp32_copy" and zero1:
        raise TrainError(
            f"train.optimizer_precision: {precision} is not supported with ZeRO-1, which divides "
            "an fp32 copy over the workers: set train.zero1=false, or take fp32_copy"
        )


def _choose(device: Device, zero1: bool) -> Callable[..., GlobalOptimizer]:
    if device.torch_device.type != "xla":
        return DataParallel
    # Imported where they are used: not every node has torch_xla.
    if zero1:
        from trnslurm.train.optim.zero1 import Zero1

        return Zero1
    from trnslurm.train.optim.xla_data_parallel import XlaDataParallel

    return XlaDataParallel
