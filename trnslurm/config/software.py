"""The software that jobs need: a range for GPUs and CPUs, exact for XLA, two sets for Trainium.

AWS supports PyTorch/XLA for training up to Neuron SDK 2.29.1: "Neuron no longer supports
PyTorch/XLA for training starting with Neuron 2.30" (2026-05-20, about-neuron/announcements/
neuron2.x/announce-no-support-pytorch-xla-training). It still comes with 2.31.1, and with no later
one (setup/pytorch/manual: "not included in Neuron 2.32.0"). The versions are those of
src/helperscripts/n2-manifest.json in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03ae,
which lists what each release consists of.

pyproject.toml and cluster-config/parallelcluster/neuron-image.sh repeat them for pip and apt; tests
compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trnslurm.frozen import Frozen


class NeuronSdk(Frozen):
    """One release of AWS's Neuron SDK."""

    support: str
    """AWS's statement about training with it."""
    pythons: tuple[int, int]
    """The lowest and the highest minor version of Python 3 for which it has packages."""
    pip: Mapping[str, str]
    apt: Mapping[str, str]


NEURON_SDKS: Mapping[str, NeuronSdk] = {
    "2.29.1": NeuronSdk(
        support="the last that AWS supports for training with PyTorch/XLA",
        pythons=(10, 12),
        pip={
            "torch-neuronx": "2.9.0.2.13.26312", "neuronx-cc": "2.24.8799.0",
            "libneuronxla": "2.2.16408.0",
        },
        apt={
            "aws-neuronx-dkms": "2.27.4.0", "aws-neuronx-collectives": "2.31.24.0",
            "aws-neuronx-runtime-lib": "2.31.24.0", "aws-neuronx-tools": "2.29.22.0",
        },
    ),
    "2.31.1": NeuronSdk(
        support="the last with PyTorch/XLA, no longer supported for training",
        pythons=(11, 13),
        pip={
            "torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360.0",
            "libneuronxla": "2.2.17544.0",
        },
        apt={
            "aws-neuronx-dkms": "2.29.0.0", "aws-neuronx-collectives": "2.33.10.0",
            "aws-neuronx-runtime-lib": "2.33.10.0", "aws-neuronx-tools": "2.31.15.0",
        },
    ),
}  # fmt: skip
_OF_XLA = {"torch": "2.9", "transformers": "4.57", "accelerate": "1.15"}
_OF_OTHERS = {name: f">={version}" for name, version in _OF_XLA.items()}


def packages_for(device: str, neuron_sdk: str) -> dict[str, str]:
    """Return the Python packages that jobs on a device need, and which versions of them."""
    if device in ("cuda", "cpu"):
        return _OF_OTHERS
    xla = {} if device == "xla-cuda" else {"torch-xla": _OF_XLA["torch"]}
    return _OF_XLA | xla | dict(NEURON_SDKS[neuron_sdk].pip if device == "neuron" else {})


def matches(version: str | None, pin: str) -> bool:
    """Check whether a version matches a pin: 2.9.1+cpu matches 2.9, and 2.14.1 >=2.9."""
    if version is None:
        return False
    if pin.startswith(">="):
        return _numbers(version) >= _numbers(pin)
    return (version.split("+")[0] + ".").startswith(pin + ".")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))
