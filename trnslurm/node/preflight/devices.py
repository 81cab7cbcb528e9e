"""Checks that a node has all its devices, and EFA."""

import time
from collections.abc import Callable
from pathlib import Path

from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.fabric import INTERFACES, efa_interfaces
from trnslurm.node.preflight.needs import Checked, Needs


def devices(needs: Needs) -> Checked:
    """Check that all devices are present and that enough of them are free."""
    return accelerator_of(needs.device).check(needs)


def efa(
    needs: Needs, root: Path = Path("/"), sleep: Callable[[float], None] = time.sleep
) -> Checked:
    """Check that the network cards are present and, on GPUs, NCCL's plugin for them."""
    if not needs.efa:
        return Checked()
    accelerator, number = accelerator_of(needs.device), len(efa_interfaces(root))
    for _ in range(accelerator.efa_late_s):
        if number >= needs.efa:
            break
        sleep(1)
        number = len(efa_interfaces(root))
    if number >= needs.efa:
        return Checked(fact=str(number), warning=accelerator.efa_warning())
    return Checked(
        fact=str(number),
        problem=f"{number} of {needs.efa} EFA interfaces in /{INTERFACES}; enable EFA in its "
        "compute resource, use an image with the driver (modinfo efa), or replace the instance",
    )
