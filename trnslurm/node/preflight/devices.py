"""Checks that a node has all its devices, and EFA."""

from pathlib import Path

from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.preflight.needs import Checked, Needs

INFINIBAND = Path("/sys/class/infiniband")


def devices(needs: Needs) -> Checked:
    """Check that all devices are present, and enough of them free."""
    return accelerator_of(needs.device).check(needs)


def efa(needs: Needs, directory: Path = INFINIBAND) -> Checked:
    """Check that the network cards are present, and on GPUs NCCL's plugin for them."""
    if not needs.efa:
        return Checked()
    number = len(list(directory.iterdir())) if directory.is_dir() else 0
    if number >= needs.efa:
        return Checked(fact=str(number), warning=accelerator_of(needs.device).efa_warning())
    return Checked(
        fact=str(number),
        problem=f"{number} of {needs.efa} EFA interfaces in {directory}; enable EFA in its compute "
        "resource, use an image with the driver (modinfo efa), or replace the instance",
    )
