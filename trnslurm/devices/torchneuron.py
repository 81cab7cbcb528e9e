"""Trainium with AWS's TorchNeuron: trn2 and trn3.

"Supported on Trainium 2 (trn2) and Trainium 3 (trn3)" (torch/about-pytorch-neuron of AWS's Neuron
documentation, SDK 2.33). It has the same package name as PyTorch/XLA's, torch-neuronx, so it needs
a separate environment. It is a public beta since SDK 2.33.0, "torch-neuronx 2.13.3.0 and 2.14.3.0",
each with the PyTorch of the same version and for Python 3.12 to 3.14 (release-notes/
components/torchneuron). The other versions come from that release's notes, because AWS's list of
release contents is older.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trnslurm.devices.device_type import OF_OTHERS, NeuronSdk
from trnslurm.devices.trainium import Trainium


class TorchNeuron(Trainium):
    """Trainium with TorchNeuron."""

    __slots__ = ()

    name = "torchneuron"
    also = "neuron"
    pins = OF_OTHERS | {"torch": "2.14"}
    sdks: ClassVar[Mapping[str, NeuronSdk]] = {
        "2.33.0": NeuronSdk(
            support="the first release with TorchNeuron, a public beta, for trn2 and trn3",
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
    commands = ("neuronx-cc",)

    compiled_by = "TorchNeuron"
    cache_name = "neff"
    compiles_scripts_ahead = False  # a script has no short run that would encounter its graphs
    compile_shapes_graphs = True

    # "For eager mode, TorchNeuron supports all three: FSDPv1, FSDPv2, and SimpleFSDP" (AWS's
    # frameworks/torch/pytorch-native-overview).
    strategies = ("fsdp", "tensor")
    runtime = "trnslurm.train.devices.torchneuron.TorchNeuronDevice"
    torch_type = "neuron"
    backend = "neuron"

    def why_not_cached(self, cache: str, layout: str) -> str:
        """Return that it has one cache for all hosts, in a directory."""
        if "://" not in cache and layout != "per-host":
            return ""
        return (
            f"compile_cache {cache}, compile_layout {layout}: TorchNeuron has one "
            "cache directory for all hosts: set compile_layout to shared, and compile_cache "
            "to an absolute path"
        )


TORCHNEURON = TorchNeuron()
