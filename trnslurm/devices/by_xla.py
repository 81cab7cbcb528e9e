"""What all PyTorch/XLA devices have in common."""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.devices.device_type import OF_XLA, DeviceType


class ByXla(DeviceType):
    """A torch_xla device."""

    __slots__ = ()

    by_xla = True
    pins = OF_XLA | {"torch-xla": OF_XLA["torch"]}
    imports = ("torch_xla", "torch_neuronx", "neuronx_distributed", "optimum.neuron")
    strategies = ("xla_fsdp", "tensor")
    has_zero1 = True
    runtime = "trnslurm.train.devices.xla.XlaDevice"
    torch_type = "xla"
    backend = "xla"
    pjrt: str
    """Its name in PJRT_DEVICE, which torch_xla reads when it starts."""

    def environment(self, given: Mapping[str, str], rank: int) -> dict[str, str]:
        """Return torch_xla's name for the device."""
        return {"PJRT_DEVICE": self.pjrt}
