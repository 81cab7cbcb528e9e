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
    number = sum(map(_is_efa, directory.iterdir())) if directory.is_dir() else 0
    if number >= needs.efa:
        return Checked(fact=str(number), warning=accelerator_of(needs.device).efa_warning())
    return Checked(
        fact=str(number),
        problem=f"{number} of {needs.efa} EFA interfaces in {directory}; enable EFA in its compute "
        "resource, use an image with the driver (modinfo efa), or replace the instance",
    )


def _is_efa(interface: Path) -> bool:
    """Check that it is no controller of NVLink, of which p6-b200 has two there (mlx5_core).

    https://github.com/aws/sagemaker-hyperpod-cli/pull/282
    """
    driver = interface / "device/driver"
    return not driver.exists() or driver.resolve().name == "efa"
