"""Numbers that change from step to step as tensors, so that XLA does not compile them in."""

from typing import Any

import torch
from torch import Tensor

from trnslurm.train.devices.device import Device

# AdamW with the rate in a tensor divides by it: at 0, what never had a gradient would become NaN.
SMALLEST_RATE = 1e-30


def rate_tensor(device: Device, lr: float) -> Tensor:
    """Put a learning rate on the device: as a vector, as torch_xla compiles a plain 0 or 1 in."""
    return device.put(torch.tensor([max(lr, SMALLEST_RATE)]))


def scalar_tensor(device: Device, value: float) -> Tensor:
    """Put a 0-dimensional number on an XLA device."""
    # Not put(): torch_xla compiles a 0-dimensional 0 or 1 into the graph.
    import torch_xla.core.xla_model

    send: Any = torch_xla.core.xla_model.send_cpu_data_to_device  # annotated too narrowly
    scalar: Tensor = send([torch.tensor(float(value))], device.torch_device)[0]
    return scalar
