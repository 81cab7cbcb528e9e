"""What trnslurm knows about each device: one file per device, with one object.

Launcher, node programs and training runtime query these objects instead of comparing names. A
device's name is text only where people or files spell it: in profiles, recipes, plan.json, records
and options.
"""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.devices.cpu import CPU
from trnslurm.devices.cuda import CUDA
from trnslurm.devices.device_type import DeviceType
from trnslurm.devices.neuron import NEURON
from trnslurm.devices.torchneuron import TORCHNEURON
from trnslurm.devices.xla_cpu import XLA_CPU
from trnslurm.devices.xla_cuda import XLA_CUDA

__all__ = [
    "CPU",
    "CUDA",
    "DEVICES",
    "NEURON",
    "TORCHNEURON",
    "XLA_CPU",
    "XLA_CUDA",
    "DeviceType",
    "device_named",
]

DEVICES: Mapping[str, DeviceType] = {
    each.name: each for each in (NEURON, TORCHNEURON, XLA_CPU, CPU, CUDA, XLA_CUDA)
}
"""Every device by its name."""


def device_named(name: str) -> DeviceType:
    """Return a device by its name; raise a ValueError if it is unknown."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not one of {', '.join(DEVICES)}")
    return DEVICES[name]
