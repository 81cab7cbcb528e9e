"""GPUs with plain PyTorch and NCCL."""

from __future__ import annotations

from trnslurm.devices.device_type import OF_OTHERS
from trnslurm.devices.gpu import Gpu


class Cuda(Gpu):
    """GPUs with plain PyTorch."""

    __slots__ = ()

    name = "cuda"
    also = "xla-cuda"
    pins = OF_OTHERS
    strategies = ("fsdp", "deepspeed", "tensor")
    runtime = "trnslurm.train.devices.plain.CudaDevice"
    torch_type = "cuda"
    backend = "nccl"


CUDA = Cuda()
