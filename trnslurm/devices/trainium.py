"""What all devices on AWS Trainium have in common.

AWS supports PyTorch/XLA for training up to Neuron SDK 2.29.1: "Neuron no longer supports
PyTorch/XLA for training starting with Neuron 2.30" (2026-05-20, about-neuron/announcements/
neuron2.x/announce-no-support-pytorch-xla-training). It is still included in 2.31.1, but in no later
release (setup/pytorch/manual: "not included in Neuron 2.32.0"). The versions are those of
src/helperscripts/n2-manifest.json in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03ae,
which lists the contents of each release.

pyproject.toml and cluster-config/parallelcluster/neuron-image.sh repeat them for pip and apt; tests
compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from trnslurm.devices.device_type import DeviceType


class Trainium(DeviceType):
    """A device on AWS Trainium, whose workers are NeuronCores."""

    __slots__ = ()

    on_trainium = True
    uses_efa = True
    probe = "trnslurm.node.accelerators.neuron.NeuronDevices"
    compiles_ahead = True
    # XLA's attention stores the weights. Nothing is published about TorchNeuron's: the larger
    # number is the safe one.
    keeps_attention_weights = True
    has_zero1 = True

    def why_one_node(self, nodes: int, instance_type: str) -> str:
        """Return that the devices of this machine belong to one node, if it has any."""
        if instance_type == "local":  # the type of all other machines, where stand-ins can run
            return ""
        return (
            f"--nodes {nodes}: this machine is a single {instance_type}, and emulated nodes cannot "
            "share its Neuron devices; use --nodes 1"
        )

    def container_options(self, runtime: str, accelerators: int) -> Sequence[str]:
        """Return each device for Podman; with Apptainer, Neuron and EFA devices come with /dev."""
        if runtime != "podman":
            return ()
        devices = [f"--device=/dev/neuron{number}" for number in range(accelerators)]
        return [" ".join(devices[at : at + 4]) for at in range(0, len(devices), 4)]
