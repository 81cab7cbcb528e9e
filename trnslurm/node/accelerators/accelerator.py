"""What node programs ask of a node's devices; DeviceType.probe names the class that answers."""

from __future__ import annotations

from importlib import import_module

from trnslurm.devices import DeviceType
from trnslurm.node.preflight.needs import Checked, Needs
from trnslurm.node.usage.devices import Tool


class Accelerator:
    """The devices of a node; this base answers for CPUs, of which nothing is asked."""

    efa_late_s: int = 0
    """How long their EFA interfaces may take to appear on a node that has just booted."""

    def check(self, needs: Needs) -> Checked:
        """Check that all devices are present, and enough of them free."""
        return Checked()

    def efa_warning(self) -> str:
        """Return what keeps the devices from using EFA; empty if nothing does."""
        return ""

    def usage_tools(self, seconds: float) -> list[Tool]:
        """Return the commands that report what the devices do, the best first."""
        return []

    def works(self) -> bool:
        """Check whether a device has computed since the last call, or cannot be asked."""
        return False


def accelerator_of(device: DeviceType | None) -> Accelerator:
    """Return what answers for a device; None: for a job without one."""
    if device is None or not device.probe:
        return Accelerator()
    module, _, name = device.probe.rpartition(".")
    found: Accelerator = getattr(import_module(module), name)()
    return found
