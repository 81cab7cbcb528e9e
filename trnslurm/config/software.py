"""The software that jobs need: a range for GPUs and CPUs, exact for XLA, three sets for Trainium.

AWS supports PyTorch/XLA for training up to Neuron SDK 2.29.1: "Neuron no longer supports
PyTorch/XLA for training starting with Neuron 2.30" (2026-05-20, about-neuron/announcements/
neuron2.x/announce-no-support-pytorch-xla-training). It still comes with 2.31.1, and with no later
one (setup/pytorch/manual: "not included in Neuron 2.32.0"). The versions are those of
src/helperscripts/n2-manifest.json in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03ae,
which lists what each release consists of.

TorchNeuron, for trn2 and trn3, has the same package name, torch-neuronx, so it needs an environment
of its own. It is a public beta since SDK 2.33.0, "torch-neuronx 2.13.3.0 and 2.14.3.0", each with
the PyTorch of its number and for Python 3.12 to 3.14 (release-notes/components/torchneuron). The
other versions are those of that release's notes: the list above is older.

pyproject.toml and cluster-config/parallelcluster/neuron-image.sh repeat them for pip and apt; tests
compare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trnslurm.config.catalog import ON_TRAINIUM, InstanceType
from trnslurm.config.schema import Cluster
from trnslurm.frozen import Frozen


class NeuronSdk(Frozen):
    """One release of AWS's Neuron SDK."""

    device: str
    """The device that it is for: neuron, by PyTorch/XLA, or torchneuron."""
    support: str
    """AWS's statement about training with it."""
    pythons: tuple[int, int]
    """The lowest and the highest minor version of Python 3 for which it and trnslurm are made."""
    pip: Mapping[str, str]
    apt: Mapping[str, str]


NEURON_SDKS: Mapping[str, NeuronSdk] = {
    "2.29.1": NeuronSdk(
        device="neuron",
        support="the last that AWS supports for training with PyTorch/XLA",
        pythons=(11, 12),
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
        device="neuron",
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
    "2.33.0": NeuronSdk(
        device="torchneuron",
        support="the first with TorchNeuron, a public beta, for trn2 and trn3",
        pythons=(12, 14),
        pip={
            "torch-neuronx": "2.14.3.0", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0",
        },
        apt={
            "aws-neuronx-dkms": "2.31.7.0", "aws-neuronx-collectives": "2.35.43.0",
            "aws-neuronx-runtime-lib": "2.35.30.0", "aws-neuronx-tools": "2.33.38.0",
        },
    ),
}  # fmt: skip
_OF_XLA = {"torch": "2.9", "transformers": "4.57", "accelerate": "1.15"}
_OF_OTHERS = {name: f">={version}" for name, version in _OF_XLA.items()}


def device_of(cluster: Cluster, instance: InstanceType) -> str:
    """Return a profile's device; `auto` is the instance type's, by the stack of neuron_sdk."""
    if cluster.device != "auto":
        return cluster.device
    of_sdk = NEURON_SDKS[cluster.neuron_sdk].device
    return of_sdk if of_sdk in instance.own_devices(ON_TRAINIUM) else instance.device


def packages_for(device: str, neuron_sdk: str) -> dict[str, str]:
    """Return the Python packages that jobs on a device need, and which versions of them."""
    if device in ("cuda", "cpu"):
        return _OF_OTHERS
    if device == "torchneuron":
        return _OF_OTHERS | {"torch": "2.14"} | dict(NEURON_SDKS[neuron_sdk].pip)
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
