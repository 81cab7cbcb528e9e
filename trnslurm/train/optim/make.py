"""Makes the optimizer of a recipe."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import GlobalOptimizer, make_spec, own_spec
from trnslurm.train.optim.own import MakeOptimizers, OwnOptimizers
from trnslurm.train.optim.zero1 import Zero1
from trnslurm.train.settings import CommonSettings, OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings,
    device: Device,
    tensors: Iterable[tuple[str, Tensor]],
    make: MakeOptimizers | None = None,
    *,
    zero1: bool | None = None,
    precision: str = "fp32_copy",
) -> GlobalOptimizer:
    """Make the optimizer that the settings name, or the job's own, which `make` returns.

    It trains the named tensors that require a gradient. Checkpoints contain all named tensors, so
    pass a model's frozen parameters too: model.named_parameters(), or, for a model with buffers
    that change or are loaded, model.state_dict(keep_vars=True).items().

    The recipes' ZeRO-1 exists on Trainium and other XLA devices; cpu and cuda ignore zero1.

    `make` is given the tensors to train by name, and returns one or more torch.optim.Optimizer:
    lambda named: Lion(named.values(), lr=1e-4). With zero1=True, the workers divide the parameters
    among themselves, which does not suit an optimizer that looks at more than one parameter at once
    (Prodigy).
    """
    if make is not None:
        return _make_own(settings, device, dict(tensors), make, zero1=bool(zero1), kind=precision)
    zero1 = zero1 is not False
    name = settings.optimizer
    if zero1 and (name == "lamb" or precision == "fp32_state"):  # a job declares it: REFUSED
        raise TrainError(
            f"{name} with {precision} is incompatible with ZeRO-1: use adamw with fp32_copy"
        )
    spec = make_spec(settings, dict(tensors), precision=precision)
    if device.torch_device.type != "xla":
        divided = zero1 and device.kind.has_zero1
        return Zero1(device, spec) if divided else DataParallel(device, spec)
    # Imported here: not every node has torch_xla.
    from trnslurm.train.optim import xla

    return xla.XlaZero1(device, spec) if zero1 else xla.XlaDataParallel(device, spec)


def _make_own(
    settings: OptimizerSettings,
    device: Device,
    tensors: Mapping[str, Tensor],
    make: MakeOptimizers,
    *,
    zero1: bool,
    kind: str,
) -> GlobalOptimizer:
    if device.torch_device.type == "xla":
        # A class of PyTorch that is not made for this counts steps, and reads rates, as Python
        # numbers (torch/optim/adam.py: _get_value); torch_xla compiles 0 and 1 into the graph, and
        # .item() ends it.
        raise TrainError(
            f"a job's own optimizer does not run on {device.name}, because XLA would compile its "
            "step count and learning rate into the graph and recompile it during the run: use "
            "device cpu or cuda, or train.optimizer without make"
        )
    assert isinstance(settings, CommonSettings)
    spec = own_spec(tensors, max_norm=settings.max_norm, precision=kind)
    return OwnOptimizers(device, spec, make, peak=settings.lr, zero1=zero1)
