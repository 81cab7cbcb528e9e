"""A parameter in bf16, updated with each precision of the optimizer; torchrun starts it for XLA.

    python -m torch.distributed.run --nproc_per_node 1 precision_worker.py xla-cpu

It prints what test_precision.py looks at as a line of JSON for each case.
"""

import itertools
import json
import sys
from typing import get_args

import torch
from torch import nn

from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
from trnslurm.train.loop.job import run_job
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.settings import OptimizerPrecision, OptimizerSettings

OPTIMIZER_PRECISIONS = get_args(OptimizerPrecision)
STEPS = 12
# Half of the least change of 1 that bf16 does not round away.
LR = 2.0**-10


def train(name, precision, device, dtype=torch.bfloat16, *, zero1=False):
    """Take steps with a gradient of 1, all alike."""
    parameter = nn.Parameter(torch.ones(4, 3, dtype=dtype, device=device.torch_device))
    settings = OptimizerSettings(
        optimizer=name, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-6, max_norm=1e9
    )
    optimizer = make_optimizer(
        settings, device, [("weight", parameter)], zero1=zero1, precision=precision
    )
    device.sync()
    graphs = []
    for _ in range(STEPS):
        parameter.sum().backward()
        device.sync()
        optimizer.step(LR)
        device.sync()
        graphs.append(device.graphs())
    shards = {shard.kind: shard.tensor.cpu() for shard in optimizer.shards()}
    return {
        "name": name,
        "precision": precision,
        "zero1": zero1,
        "parameter": parameter.flatten()[0].item(),
        "saved": {kind: tensor.flatten()[0].item() for kind, tensor in shards.items()},
        "types": {kind: str(tensor.dtype) for kind, tensor in shards.items()},
        "late_graphs": graphs[-1] - graphs[1],
    }


def main():
    device = open_device(sys.argv[1], read_environment())
    for name, precision in itertools.product(("adamw", "lamb"), OPTIMIZER_PRECISIONS):
        print(json.dumps(train(name, precision, device)), flush=True)
    for name, precision in itertools.product(("adamw", "adam"), ("fp32_copy", "as_model")):
        print(json.dumps(train(name, precision, device, zero1=True)), flush=True)
    device.close()


if __name__ == "__main__":
    run_job(main)
