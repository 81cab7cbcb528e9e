"""Trainium with PyTorch/XLA: trn1, and trn2 too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from trnslurm.devices.by_xla import ByXla
from trnslurm.devices.device_type import NeuronSdk
from trnslurm.devices.trainium import Trainium


class XlaNeuron(ByXla, Trainium):
    """Trainium with PyTorch/XLA."""

    __slots__ = ()

    name = "neuron"
    pjrt = "NEURON"
    sdks: ClassVar[Mapping[str, NeuronSdk]] = {
        "2.29.1": NeuronSdk(
            support="the last release that AWS supports for training with PyTorch/XLA",
            pythons=(11, 12),
            pip={
                "torch-neuronx": "2.9.0.2.13.26312", "neuronx-cc": "2.24.8799.0",
                "libneuronxla": "2.2.16408.0",
            },
            apt={
                "aws-neuronx-dkms": "2.27.4.0", "aws-neuronx-collectives": "2.31.24.0",
                "aws-neuronx-runtime-lib": "2.31.24.0", "aws-neuronx-tools": "2.29.22.0",
            },
            # "can reduce latency by roughly 12% for training workloads. [...] the recommendation is
            # to set NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS to 3" (neuron-runtime/guides/
            # configuration-guide, at the same commit). SDK 2.31 has removed it (about-neuron/
            # announcements/neuron2.x/announce-no-support-implicit-async-mode).
            graphs_ahead=3,
        ),
        "2.31.1": NeuronSdk(
            support="the last release with PyTorch/XLA, no longer supported for training",
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
    commands = ("neuron_parallel_compile", "neuronx-cc")
    module_has_version = True

    compiled_by = "neuron_parallel_compile"
    parallel_compile = True
    cache_on_nodes = True
    # Neuron's cache remembers graphs whose compilation failed or was interrupted, and skips them
    # forever without this option of libneuronxla, the compiler's wrapper. The option is not part
    # of the graph key.
    compiler_flags = ("--retry_failed_compilation",)
    sets_neuron_env = True

    # Neuron's runtime accepts up to 7 (NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS), and torch_xla
    # holds one more.
    graphs_in_flight = 8

    def runs_on(self, instance_type: str) -> bool:
        """Check that it is not trn3: AWS ended training support for PyTorch/XLA before that."""
        return not instance_type.startswith("trn3")

    def machine_of(self, files: Sequence[str]) -> tuple[str, str] | None:
        """Return the trn1 instance type with as many devices."""
        own = [f for f in files if f.startswith("neuron") and f.removeprefix("neuron").isdigit()]
        if not own:
            return None
        return "trn1.32xlarge" if len(own) == 16 else "trn1.2xlarge", f"{len(own)} /dev/neuron*"


NEURON = XlaNeuron()
