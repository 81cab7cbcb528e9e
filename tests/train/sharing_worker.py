"""Gradients that three workers of a machine sum; torchrun starts it.

    python -m torch.distributed.run --nproc_per_node 3 sharing_worker.py

It fails where a sum is wrong, or a file stays open.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
from trnslurm.train.optim.gradients import SharedGradients

STEPS = 5


def main():
    device = open_device("cpu", read_environment())
    assert SharedGradients.fit(device)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for dtype in (torch.float32, torch.bfloat16):
        # 31 numbers, which three workers cannot divide evenly.
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 7), (3,))]
        shared = SharedGradients(parameters, dtype, device)
        assert shared.whole.dtype == dtype and not shared.whole.any()
        for step in range(STEPS):
            of_all = [made(step, rank, parameters, dtype) for rank in range(device.world)]
            for parameter, gradient in zip(parameters, of_all[device.rank], strict=True):
                shared.gradients[parameter].copy_(gradient)
            shared.all_reduce()
            for number, parameter in enumerate(parameters):
                found = shared.gradients[parameter]
                expected = sum(gradients[number].float() for gradients in of_all)
                # In bf16 the sum is rounded once, not with each worker.
                torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
            shared.whole.fill_(device.rank)  # as clipping does: others' sums stay what they are
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    dist.barrier()
    device.close()


def made(step, rank, parameters, dtype):
    """Return the gradients of a worker, which all can make; whole numbers, so sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        torch.randint(-40, 40, parameter.shape, generator=generator).to(dtype)
        for parameter in parameters
    ]


if __name__ == "__main__":
    main()
