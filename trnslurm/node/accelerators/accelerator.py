"""The interface for a node's devices. DeviceType.probe names the class that implements it."""

from __future__ import annotations

from importlib import import_module

from trnslurm.devices import DeviceType
from trnslurm.node.preflight.needs import Checked, Needs
from trnslurm.node.usage.devices import Tool


class Accelerator:
    """The devices of a node. This base class handles CPUs, which are not queried."""

    efa_late_s: int = 0
    """How long the EFA interfaces may take to appear on a node that has just booted."""

    def check(self, needs: Needs) -> Checked:
        """Check that all devices are present and that enough of them are free."""
        return Checked()

    def efa_warning(self) -> str:
        """Return what prevents the devices from using EFA, or an empty string if nothing does."""
        return ""

    def usage_tools(self, seconds: float) -> list[Tool]:
        """Return the commands that report device usage, best first."""
        return []

    def works(self) -> bool:
        """Check whether a device has computed since the last call, or cannot be queried."""
        return False


def accelerator_of(device: DeviceType | None) -> Accelerator:
    """Return the object that checks this type of device; the base class for None."""
    if device is None or not device.probe:
        return Accelerator()
    module, _, name = device.probe.rpartition(".")
    found: Accelerator = getattr(import_module(module), name)()
    return found
