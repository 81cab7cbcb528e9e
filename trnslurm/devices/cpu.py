"""The host's CPUs with plain PyTorch and gloo."""

from __future__ import annotations

from trnslurm.devices.device_type import OF_OTHERS, DeviceType


class Cpu(DeviceType):
    """The host's CPUs with plain PyTorch."""

    __slots__ = ()

    name = "cpu"
    on_host = True
    also = "xla-cpu"
    pins = OF_OTHERS
    strategies = ("fsdp", "deepspeed", "tensor")
    runtime = "trnslurm.train.devices.plain.TorchDevice"
    torch_type = "cpu"
    backend = "gloo"
    checkup_mb = 8


CPU = Cpu()
