"""Opens the device that a plan names."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from trnslurm.devices import device_named
from trnslurm.train.devices.device import Device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

if TYPE_CHECKING:  # so they are among the sources that shape a job's graphs
    from trnslurm.train.devices.plain import TorchDevice
    from trnslurm.train.devices.torchneuron import TorchNeuronDevice
    from trnslurm.train.devices.xla import XlaDevice


def open_device(name: str, environment: Environment) -> Device:
    """Open the device that the plan names, and join the other workers."""
    try:
        kind = device_named(name)
    except ValueError as error:
        raise TrainError(f"plan.json: {error}") from None
    if environment.device not in ("", name):
        raise TrainError(f"plan.json: device {name}, but TRNSLURM_DEVICE is {environment.device}")
    # Before the first import: not every Python has what another device needs.
    os.environ |= kind.environment(os.environ, environment.rank)
    module, _, runtime = kind.runtime.rpartition(".")
    opened: TorchDevice | TorchNeuronDevice | XlaDevice
    opened = getattr(import_module(module), runtime)(kind, environment)
    return opened
