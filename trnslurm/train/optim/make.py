"""Makes the optimizer of a recipe."""

from collections.abc import Iterable

from torch import Tensor

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import GlobalOptimizer, make_spec
from trnslurm.train.optim.zero1 import Zero1
from trnslurm.train.settings import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings,
    device: Device,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    zero1: bool = True,
    precision: str = "fp32_copy",
) -> GlobalOptimizer:
    """Make the optimizer of the settings.

    It trains those of the named tensors that require a gradient. Checkpoints have all of them, so
    give it a model's frozen parameters too: model.named_parameters(), or, for a model with buffers
    that change or are loaded, model.state_dict(keep_vars=True).items().

    ZeRO-1 exists on Trainium and other XLA devices; cpu and cuda ignore zero1.
    """
    name = settings.optimizer
    if zero1 and (name == "lamb" or precision == "fp32_state"):  # a job declares it: REFUSED
        raise TrainError(f"{name} with {precision} does not go with ZeRO-1: take adamw, fp32_copy")
    spec = make_spec(settings, dict(tensors), precision=precision)
    if device.torch_device.type != "xla":
        divided = zero1 and device.kind.has_zero1
        return Zero1(device, spec) if divided else DataParallel(device, spec)
    # Imported here: not every node has torch_xla.
    from trnslurm.train.optim import xla

    return xla.Zero1(device, spec) if zero1 else xla.XlaDataParallel(device, spec)
