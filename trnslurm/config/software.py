"""The software that jobs need, and which device a profile means."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trnslurm.config.catalog import InstanceType
from trnslurm.config.schema import Cluster
from trnslurm.devices import DEVICES, DeviceType, device_named
from trnslurm.devices.device_type import NeuronSdk
from trnslurm.errors import ConfigError

NEURON_SDKS: Mapping[str, NeuronSdk] = {
    version: sdk for device in DEVICES.values() for version, sdk in device.sdks.items()
}
"""Every release of the Neuron SDK whose packages are known."""


def _is_later(neuron_sdk: str) -> bool:
    """Check whether a release is newer than all known ones, such as 2.33.1 of November 2026."""
    later = _numbers(neuron_sdk) > _numbers(_newest())
    return later and bool(re.fullmatch(r"\d+\.\d+\.\d+", neuron_sdk))


def _newest() -> str:
    return max(NEURON_SDKS, key=_numbers)


def check_sdk(neuron_sdk: str) -> None:
    """Reject a release of the Neuron SDK that jobs do not support."""
    if neuron_sdk not in NEURON_SDKS and not _is_later(neuron_sdk):
        raise ConfigError(
            f"neuron_sdk is {neuron_sdk!r}: it must be {', '.join(NEURON_SDKS)} or a later release"
        )


def device_of_sdk(neuron_sdk: str) -> DeviceType:
    """Return the device of a Neuron SDK release; an unknown newer one counts as the newest."""
    known = neuron_sdk if neuron_sdk in NEURON_SDKS else _newest()
    return next(device for device in DEVICES.values() if known in device.sdks)


def device_of(cluster: Cluster, instance: InstanceType) -> DeviceType:
    """Return a profile's device. `auto` means the instance type's, for the stack in neuron_sdk."""
    if cluster.device != "auto":
        return device_named(cluster.device)
    of_sdk = device_of_sdk(cluster.neuron_sdk)
    return of_sdk if of_sdk in instance.own_devices(()) else instance.device


def packages_for(device: DeviceType, neuron_sdk: str) -> dict[str, str]:
    """Return the Python packages that jobs on a device need, with their versions.

    An unknown release requires at least the versions of the newest known release.
    """
    if not device.sdks or neuron_sdk in NEURON_SDKS:
        return {**device.pins, **(NEURON_SDKS[neuron_sdk].pip if device.sdks else {})}
    pins = {**device.pins, **NEURON_SDKS[_newest()].pip}
    return {name: f">={pin.removeprefix('>=')}" for name, pin in pins.items()}


def matches(version: str | None, pin: str) -> bool:
    """Check whether a version matches a pin: 2.9.1+cpu matches 2.9, and 2.14.1 matches >=2.9."""
    if version is None:
        return False
    if pin.startswith(">="):
        return _numbers(version) >= _numbers(pin)
    return (version.split("+")[0] + ".").startswith(pin + ".")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))
