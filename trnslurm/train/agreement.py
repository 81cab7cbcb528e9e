"""The check that every worker ends with the same parameters, bit for bit."""

import hashlib

import torch
from torch import nn

from trnslurm.train.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.reports import say


def conclude(device: Device, model: nn.Module, environment: Environment) -> None:
    """Say that the workers agree at the end of a run; in a training it is an error if not."""
    precompile = environment.phase == "precompile"
    if not (parameters_agree(device, model) or precompile):
        raise TrainError("the workers' parameters differ at the end: this training is not valid")
    if device.rank == 0:
        say("precompile done: losses above are invalid" if precompile else "ranks agree")


def parameters_agree(device: Device, model: nn.Module) -> bool:
    """Compare a checksum of the parameters over all workers."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    # Three bytes are a whole number that single precision holds exactly. All are equal if the
    # largest is this worker's own, and so is the largest of the negatives.
    parts = [float(int.from_bytes(digest.digest()[i : i + 3], "big")) for i in range(0, 12, 3)]
    both = [*parts, *(-part for part in parts)]
    return device.largest(both) == both
