"""Predicts from a ParallelCluster file what Slurm will report about the cluster.

ParallelCluster's cookbook generates slurm.conf from the file, in config_renderer.py and
templates/slurm_parallelcluster.conf:
https://github.com/aws/aws-parallelcluster-cookbook/tree/develop/cookbooks/aws-parallelcluster-slurm/files/default/head_node_slurm/slurm
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trnslurm.config.catalog import InstanceType
from trnslurm.config.search import read_yaml
from trnslurm.errors import ConfigError
from trnslurm.slurm.snapshot import Fields, Snapshot

_MOST_COUNT = 10
"""ParallelCluster's default of MaxCount."""
_SCHEDULABLE_MEMORY = 0.95
_SHARED = ("FsxLustre", "FsxOpenZfs", "FsxOntap", "FileCache", "Efs")


def is_cluster_file(file: Path) -> bool:
    """Check by its name whether a file is a ParallelCluster file, not a dump of detect."""
    return file.suffix in (".yaml", ".yml")


def read_cluster_file(
    file: Path, types: Mapping[str, InstanceType]
) -> tuple[Snapshot, Path | None, list[str]]:
    """Return the cluster, a directory that all nodes share, and the omitted instance types."""
    try:
        seen, shared, left_out = _read(read_yaml(file), types)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file}: not a ParallelCluster file with Slurm queues ({why})") from None
    if not seen.nodes:
        raise ConfigError(
            f"{file}: the catalog has none of its instance types: {', '.join(left_out)}. On the "
            "cluster, `trnslurm cluster detect --write --ask-nodes` creates a profile"
        )
    return seen, shared, left_out


def _read(
    tree: Mapping[str, Any], types: Mapping[str, InstanceType]
) -> tuple[Snapshot, Path | None, list[str]]:
    scheduling = tree["Scheduling"]
    queues: Sequence[Mapping[str, Any]] = scheduling["SlurmQueues"]
    settings = scheduling.get("SlurmSettings") or {}
    by_memory = settings.get("EnableMemoryBasedScheduling", False)
    database = settings.get("Database")
    config = {
        "AccountingStorageType": f"accounting_storage/{'slurmdbd' if database else 'none'}",
        "ClusterName": "parallelcluster",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_MEMORY" if by_memory else "CR_CPU",
    }
    for own in settings.get("CustomSlurmSettings") or ():
        config |= {str(key): str(value) for key, value in own.items()}
    nodes: list[Fields] = []
    left_out: list[str] = []
    for queue in queues:
        for resource in queue["ComputeResources"]:
            name = _type_of(resource)
            if name in types:
                nodes += _nodes(queue["Name"], resource, types[name])
            else:
                left_out += [] if name in left_out else [name]
    seen = Snapshot(
        config=config,
        partitions=[_partition(queue, queue is queues[0]) for queue in queues],
        nodes=nodes,
        groups=[],
    )
    return Snapshot.parse(seen.tree()), _shared(tree), left_out


def _type_of(resource: Mapping[str, Any]) -> str:
    """Return a compute resource's instance type, the first if there is more than one."""
    several = resource.get("Instances") or [{"InstanceType": resource.get("InstanceType")}]
    return str(several[0]["InstanceType"])


def _nodes(
    queue: str, resource: Mapping[str, Any], instance: InstanceType
) -> Iterator[dict[str, str]]:
    fixed = int(resource.get("MinCount", 0))
    others = int(resource.get("MaxCount", max(_MOST_COUNT, fixed))) - fixed
    threads = 1 if resource.get("DisableSimultaneousMultithreading") else 2
    memory = int(instance.host_gib * 1024 * _SCHEDULABLE_MEMORY)
    words = {"RealMemory": str(resource.get("SchedulableMemory") or memory)}
    if instance.gpus:
        words["Gres"] = f"gpu:{instance.gpus}"
    cpus = instance.vcpus * threads // 2
    words |= {"CPUTot": str(cpus), "CPUEfctv": str(cpus), "Sockets": str(cpus)}
    words |= {"CoresPerSocket": "1", "ThreadsPerCore": "1"}
    kind = [] if len(resource.get("Instances") or ()) > 1 else [_type_of(resource)]
    more = ["efa"] if (resource.get("Efa") or {}).get("Enabled") else []
    more += ["gpu"] if instance.gpus else []
    for short, word, count, weight in (("st", "static", fixed, 1), ("dy", "dynamic", others, 1000)):
        features = ",".join([word, *kind, resource["Name"], *more])
        for number in range(1, count + 1):
            yield (
                words
                | {
                    "NodeName": f"{queue}-{short}-{resource['Name']}-{number}",
                    "Partitions": queue,
                    "AvailableFeatures": features,
                    "ActiveFeatures": features,
                    "Weight": str(weight),
                    "State": "IDLE+CLOUD",
                }
                | {str(k): str(v) for k, v in (resource.get("CustomSlurmSettings") or {}).items()}
            )


def _partition(queue: Mapping[str, Any], first: bool) -> Fields:
    fields = {
        "PartitionName": queue["Name"],
        "Default": "YES" if first else "NO",
        "MaxTime": "UNLIMITED",
        "State": "UP",
    }
    if queue.get("JobExclusiveAllocation"):
        fields["OverSubscribe"] = "EXCLUSIVE"
    for key, value in (queue.get("CustomSlurmSettings") or {}).items():
        fields[str(key)] = _shown(str(key), str(value))
    return fields


def _shown(key: str, value: str) -> str:
    """Return a setting as scontrol prints it: minutes become hours, minutes and seconds."""
    if value.upper() in ("INFINITE", "UNLIMITED"):
        return "UNLIMITED"
    if key in ("MaxTime", "DefaultTime") and re.fullmatch(r"\d+", value):
        return f"{int(value) // 60:02}:{int(value) % 60:02}:00"
    return value


def _shared(tree: Mapping[str, Any]) -> Path | None:
    every = tree.get("SharedStorage") or ()
    found = {s["StorageType"]: s["MountDir"] for s in reversed(every)}
    return next((Path("/", found[kind]) for kind in _SHARED if kind in found), None)
