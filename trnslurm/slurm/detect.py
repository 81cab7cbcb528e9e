"""Makes a cluster profile from the description that Slurm's controller gives."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trnslurm.config.catalog import InstanceType
from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.commands import Slurm

MOUNTS = Path("/proc/self/mounts")
EXPORTS = Path("/var/lib/nfs/etab")  # the current exports, from /etc/exports and other sources

# Types in /proc/self/mounts. Built for many nodes that write at once, so preferred.
_PARALLEL = {"lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "panfs", "orangefs"}
_NFS = {"nfs", "nfs4"}  # EFS and FSx for OpenZFS too


class Partition(Frozen):
    """One partition; the controller describes its nodes even while they are powered down."""

    name: str
    default: bool
    nodes: int
    cpus: int
    gpus: int
    memory_mib: int
    max_time_min: int | None
    instance_type: str | None
    """From ParallelCluster's node features; None if they name no known type."""


class DetectedCluster(Frozen):
    """A cluster as its controller describes it."""

    cluster: str
    accounting: bool
    partitions: tuple[Partition, ...]

    def best(self) -> Partition:
        """Return the likely partition for training: known accelerators first, then the largest."""
        order = [(p.instance_type is not None, p.gpus, p.default, p.nodes) for p in self.partitions]
        return self.partitions[order.index(max(order))]


def detect(slurm: Slurm, types: Mapping[str, InstanceType]) -> DetectedCluster:
    """Return the partitions and nodes that the controller knows."""
    config = slurm.configuration()
    nodes = slurm.show("node")
    found = [_partition(p, nodes, types) for p in slurm.show("partition")]
    usable = tuple(p for p in found if p.nodes)
    if not usable:
        raise SlurmError("scontrol shows no partition with nodes, so there is nothing to describe")
    return DetectedCluster(
        cluster=config.get("ClusterName", "cluster"),
        accounting="slurmdbd" in config.get("AccountingStorageType", ""),
        partitions=usable,
    )


def profile_text(
    site: DetectedCluster, partition: Partition, bin_dir: str | None, shared: Path | None = None
) -> str:
    """Return a commented cluster profile for a partition; all nodes mount the path `shared`."""
    accounting = "on" if site.accounting else "off: status works without it"
    limit = "null" if partition.max_time_min is None else str(partition.max_time_min)
    found = shared or Path("~")
    cache = "null" if shared is None else _scalar(str(shared / "trnslurm-compile-cache"))
    known = "It seems that all nodes share this one" if shared else "No shared one was found"
    lines = [
        f"description: {_scalar(f'{site.cluster}, partition {partition.name}')}",
        "",
        "# Made by `trnslurm cluster detect --write`. Check run_root and python, then test them",
        "# with `trnslurm env check`.",
        f"# Found: {partition.nodes} nodes, {partition.cpus} CPUs, "
        f"{partition.memory_mib // 1024} GiB each; accounting {accounting}.",
        "scheduler: slurm",
        f"instance_type: {_scalar(partition.instance_type or partition.name)}",
        "",
        f"# Directories on a file system that all nodes share. {known}.",
        f"run_root: {_scalar(str(found / 'trnslurm-runs'))}",
        f"data_root: {_scalar(str(found / 'trnslurm-data'))}",
        "# The nodes' Python, with the pinned stack; this is the one that made the profile.",
        "activate: []",
        f"python: {_scalar(sys.executable)}",
        "",
        "# Compiled graphs of Neuron devices, on a shared file system. null: each node's /var/tmp,",
        "# which goes with the node.",
        f"compile_cache: {cache}",
        "# submit asks (or needs --yes) above this many node-hours; null: never.",
        "ask_above_node_hours: null",
        "",
        "slurm:",
        f"  partition: {_scalar(partition.name)}",
        f"  max_nodes: {partition.nodes}",
        f"  max_time_min: {limit}",
        f"  cpus_per_task: {partition.cpus}",
        "  data_partition: null  # for `data prepare --submit`, which needs only CPUs",
        f"  bin_dir: {'null' if bin_dir is None else _scalar(bin_dir)}",
    ]
    return "\n".join(lines + ([] if partition.instance_type else _own_type(partition))) + "\n"


def _own_type(partition: Partition) -> list[str]:
    """Return the lines that define an instance type that the catalog lacks."""
    device, count = ("cuda", partition.gpus) if partition.gpus else ("cpu", partition.cpus)
    workers = [n for n in (1, 2, 4, 8, 16, count) if n <= count]
    listed = sorted(set(workers))
    return [
        "",
        "# Not in the catalog. Add efa, bf16_tflops and price_per_hour where they are known.",
        "instance_types:",
        f"  {_scalar(partition.name)}:",
        f"    device: {device}",
        f"    accelerators: {max(partition.gpus, 1)}",
        f"    workers: {listed}",
        f"    multi_node_workers: {listed}",
        f"    vcpus: {partition.cpus}",
        f"    host_gib: {partition.memory_mib // 1024}",
    ]


def _partition(
    fields: Mapping[str, str],
    nodes: Sequence[Mapping[str, str]],
    types: Mapping[str, InstanceType],
) -> Partition:
    name = fields["PartitionName"]
    ours = [n for n in nodes if name in n.get("Partitions", "").split(",")]
    features = Counter(f for n in ours for f in n.get("AvailableFeatures", "").split(","))
    known = [f for f, _ in features.most_common() if f in types]
    gpus = [
        int(m[1]) for n in ours if (m := re.search(r"gpu:(?:[^:,()]+:)?(\d+)", n.get("Gres", "")))
    ]
    return Partition(
        name=name,
        default=fields.get("Default") == "YES",
        nodes=len(ours),
        cpus=min((int(n.get("CPUTot", 0)) for n in ours), default=0),
        gpus=min(gpus, default=0),
        memory_mib=min((int(n.get("RealMemory", 0)) for n in ours), default=0),
        max_time_min=_minutes(fields.get("MaxTime", "UNLIMITED")),
        instance_type=known[0] if known else None,
    )


def _minutes(text: str) -> int | None:
    """Return the minutes of a time limit as Slurm prints it; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, _ = (int(g or 0) for g in match.groups())
    return (days * 24 + hours) * 60 + minutes


def _scalar(text: str) -> str:
    return json.dumps(text)  # any JSON string is a YAML one


def find_shared() -> Path | None:
    """Return a directory of this user that the nodes seem to share with this host, or None.

    A login node mounts the cluster's file systems like the nodes. ParallelCluster's head node has
    /home on a local disk and exports it, so exported directories count too.
    """
    home = Path.home()
    mounts = dict(_mounts())
    for place, kind in sorted(mounts.items()):
        if kind in _PARALLEL:
            own = place / getpass.getuser()
            if os.access(own if own.is_dir() else place, os.W_OK | os.X_OK):
                return own
    holder = next((p for p in (home, *home.parents) if p in mounts), Path("/"))
    if mounts.get(holder) in _PARALLEL | _NFS:
        return home
    return home if any(p in _exported() for p in (home, *home.parents)) else None


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield every mount point and its type; a later mount on the same point counts."""
    for line in _lines(MOUNTS):
        _, place, kind, *_ = line.split()
        yield Path(_unescaped(place)), kind


def _exported() -> set[Path]:
    return {Path(_unescaped(line.split()[0])) for line in _lines(EXPORTS) if line[:1] == "/"}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(word: str) -> str:
    r"""Return a path with escapes such as \040, a space, replaced."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
