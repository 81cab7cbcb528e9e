"""The check that every worker ends with the same parameters, bit for bit."""

import hashlib
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.say import say

# The batch script sets it to 1 for parameters in bf16 that have no copy of more bits.
_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


def conclude(
    device: Device, tensors: Iterable[Tensor], what: str, environment: Environment
) -> None:
    """Report that the workers agree at the end of a run; in a training it is an error if not.

    But where each device rounds stochastically, a worker's parameters may drift by themselves.
    """
    precompile = environment.phase == "precompile"
    agree, rounds = all_equal(device, tensors), os.environ.get(_ROUNDING) == "1"
    if not (agree or rounds or precompile):
        raise TrainError(f"the workers' {what} differ at the end: this training is not valid")
    if device.rank == 0:
        said = "ranks agree" if agree else f"ranks differ in {what}: they round stochastically"
        say("precompile done: losses above are invalid" if precompile else said)


def all_equal(device: Device, tensors: Iterable[Tensor]) -> bool:
    """Compare a checksum of tensors over all workers."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    # Three bytes are a whole number that single precision holds exactly. All are equal if the
    # largest is this worker's own, and so is the largest of the negatives.
    parts = [float(int.from_bytes(digest.digest()[i : i + 3], "big")) for i in range(0, 12, 3)]
    both = [*parts, *(-part for part in parts)]
    return device.largest(both) == both
