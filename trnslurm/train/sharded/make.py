"""Makes a model that is divided over all workers, with the plan's strategy."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trnslurm.contract.rundir import RunFiles
from trnslurm.train.devices.device import Device
from trnslurm.train.plan import JobPlan
from trnslurm.train.sharded.settings import ShardedSettings, read_strategy
from trnslurm.train.sharded.strategy import Sharded, ShardingRequest, shapes_of
from trnslurm.train.sharded.values import new_values, saved_values


def shard_model(
    plan: JobPlan,
    settings: ShardedSettings,
    device: Device,
    run_dir: Path,
    make_model: Callable[[], nn.Module],
    *,
    std: float,
) -> Sharded:
    """Make a model, divide it with the run's strategy, and set its initial values.

    make_model makes the model on the device that PyTorch's context names. Its values do not matter:
    each tensor gets new values with this deviation, or values that are read from init_from.
    """
    with torch.device("meta"):
        blueprint = make_model()
    file = read_strategy(RunFiles(run_dir).strategy_file, plan, settings)
    request = ShardingRequest(plan, settings, device, file, blueprint, make_model)
    sharded = _strategy(settings.strategy)(request)
    if settings.init_from:
        first = saved_values(settings.init_from, blueprint)
    else:
        first = new_values(shapes_of(blueprint), seed=plan.seed, std=std)
    sharded.load(first, updates=0)
    return sharded


def _strategy(name: str) -> Callable[[ShardingRequest], Sharded]:
    # Each imported where it is used: not every node has torch_xla, or DeepSpeed.
    if name == "fsdp":
        from trnslurm.train.sharded.fsdp import Fsdp

        return Fsdp
    if name == "deepspeed":
        from trnslurm.train.sharded.zero3 import Zero3

        return Zero3
    if name == "tensor":
        from trnslurm.train.sharded.tensor import TensorParallel

        return TensorParallel
    from trnslurm.train.sharded.xla_fsdp import XlaFsdp

    return XlaFsdp
