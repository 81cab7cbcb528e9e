"""What all devices on NVIDIA GPUs have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trnslurm.devices.device_type import DeviceType

# Other vendors' names in a Slurm GRES type: AMD's mi50, mi300x, amd_instinct_mi250; Intel's.
_OF_OTHERS = re.compile(
    r"(^|[^a-z])(amd|instinct|mi\d{2,3}[a-z]?|radeon|vega|intel|iris|arc|pvc)([^a-z]|$)",
    re.IGNORECASE,
)


def is_of_other_maker(kind: str) -> bool:
    """Check whether a GPU type names a vendor other than NVIDIA."""
    return bool(_OF_OTHERS.search(kind))


class Gpu(DeviceType):
    """A device on GPUs. Each worker has one GPU."""

    __slots__ = ()

    on_gpus = True
    uses_efa = True
    probe = "trnslurm.node.accelerators.nvidia.NvidiaGpus"
    preflight_wait_s = 60.0  # the driver may have to start first

    def why_one_node(self, nodes: int, instance_type: str) -> str:
        """Return that the GPUs of this machine belong to one node."""
        # Each node would start with the first GPU, and NCCL does not support two workers on one
        # GPU.
        return (
            f"--nodes {nodes}: this machine's nodes are emulated, and its GPUs all belong to "
            f"one node. Use --nodes 1 --workers {nodes}, with a GPU for each worker"
        )

    def container_options(self, runtime: str, accelerators: int) -> Sequence[str]:
        """Return the option for NVIDIA's libraries and devices; pyxis does not need one."""
        # Podman uses CDI, from NVIDIA's container toolkit.
        options = {"apptainer": ("--nv",), "podman": ("--device=nvidia.com/gpu=all",)}
        return options.get(runtime, ())
