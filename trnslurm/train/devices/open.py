"""Opens the device that a plan names."""

import os

from trnslurm.train.devices.device import Device
from trnslurm.train.devices.plain import TorchDevice
from trnslurm.train.devices.torchneuron import TorchNeuronDevice
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

# The devices of torch_xla, and their names there.
_PJRT_DEVICES = {"neuron": "NEURON", "xla-cpu": "CPU", "xla-cuda": "CUDA"}
DEVICES = ("cpu", "cuda", "torchneuron", *_PJRT_DEVICES)


def open_device(name: str, environment: Environment) -> Device:
    """Open the device that the plan names and join the other workers."""
    if name not in DEVICES:
        raise TrainError(f"plan.json: device {name!r} is not one of {', '.join(DEVICES)}")
    if environment.device not in ("", name):
        raise TrainError(f"plan.json: device {name}, but TRNSLURM_DEVICE is {environment.device}")
    if name == "torchneuron":
        return TorchNeuronDevice(environment)
    if name not in _PJRT_DEVICES:
        return TorchDevice(name, environment)
    # torch_xla reads its environment when it starts, so this comes before its first import.
    os.environ["PJRT_DEVICE"] = _PJRT_DEVICES[name]
    if name == "xla-cpu":
        # As on Neuron (AWS's torch-neuron-envvars.rst): views and writes in place are traced by
        # other code then, and aliases may be missed (pytorch/xla#8093).
        os.environ.setdefault("XLA_DISABLE_FUNCTIONALIZATION", "1")
    if name == "xla-cuda" and (cache := os.environ.get("XLA_PERSISTENT_CACHE_PATH")):
        # Two workers that write to one directory would spoil each other's entries.
        os.environ["XLA_PERSISTENT_CACHE_PATH"] = f"{cache}/{environment.rank}"
    from trnslurm.train.devices.xla import XlaDevice

    return XlaDevice(name, environment)
