"""The check that every worker ends with the same parameters, bit for bit."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.say import say


def conclude(
    device: Device, tensors: Iterable[Tensor], what: str, environment: Environment
) -> None:
    """Report that the workers agree at the end of a run; in a training it is an error if not."""
    precompile = environment.phase == "precompile"
    if not (all_equal(device, tensors) or precompile):
        raise TrainError(f"the workers' {what} differ at the end: this training is not valid")
    if device.rank == 0:
        say("precompile done: losses above are invalid" if precompile else "ranks agree")


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
