"""Finds the network interfaces that carry the nodes' training traffic: EFA, or InfiniBand."""

from __future__ import annotations

from pathlib import Path

INTERFACES = Path("sys/class/infiniband")


def efa_interfaces(root: Path = Path("/")) -> list[Path]:
    """Return the EFA interfaces of this node."""
    return [interface for interface in (root / INTERFACES).glob("*") if _is_efa(interface)]


def fabric_interfaces(root: Path = Path("/")) -> list[Path]:
    """Return the EFA interfaces or, on nodes without EFA, those of InfiniBand and RoCE.

    Besides EFA, p6-b200 and p6-b300 have two more, such as ibp198s0f0 of mlx5_core: the NVLink
    controllers (https://github.com/aws/sagemaker-hyperpod-cli/pull/282).
    """
    return efa_interfaces(root) or [*(root / INTERFACES).glob("*")]


def _is_efa(interface: Path) -> bool:
    """Check an interface's driver or, without one, its name.

    rdma-core names an interface rdma* if its protocol is unknown, and ib* for InfiniBand
    (kernel-boot/rdma-persistent-naming.rules).
    """
    driver = interface / "device/driver"
    if driver.exists():
        return driver.resolve().name == "efa"
    return interface.name.startswith(("efa", "rdma"))
