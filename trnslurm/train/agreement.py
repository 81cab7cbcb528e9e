"""The check that every worker ends with the same parameters, bit for bit."""

import hashlib

import torch
from torch import nn

from trnslurm.train.device import Device


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
