"""Writes a cluster profile for detected nodes. A comment says where each value comes from."""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trnslurm.config.catalog import InstanceType
from trnslurm.config.schema import Cluster
from trnslurm.devices import CPU, CUDA
from trnslurm.slurm.detect import DetectedCluster, Nodes

MOUNTS = Path("/proc/self/mounts")
EXPORTS = Path("/var/lib/nfs/etab")  # the current exports, from /etc/exports and other sources

# Types in /proc/self/mounts. These are built for many writing nodes, so they are preferred.
_PARALLEL = {"lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "panfs", "orangefs"}
_NFS = {"nfs", "nfs4"}  # EFS and FSx for OpenZFS too
_COMMENT_AT = 28
_MOST_NAMED = 3


def profile_text(
    site: DetectedCluster,
    chosen: Nodes,
    known: InstanceType | None,
    bin_dir: str | None,
    shared: Path | None = None,
    *,
    here: bool = True,
) -> str:
    """Return a commented cluster profile, in which all nodes mount the path `shared`.

    `known` is the catalog's entry for the nodes' instance type. `here` says whether this host
    belongs to the cluster.
    """
    accounting = "on" if site.accounting else "off: status works without it"
    found = shared or Path("~")
    cache = "null" if shared is None else _scalar(str(shared / "trnslurm-compile-cache"))
    where = "It seems that all nodes share this one" if shared else "No shared one was found"
    python = sys.executable if here else str(found / "venvs/trnslurm/bin/python")
    whose = "this one wrote the profile" if here else "a guess that you must check"
    own = _own_name(chosen)
    memory = f"{chosen.memory_mib // 1024} GiB" if chosen.memory_mib else "memory not known"
    lines = [
        f"description: {_scalar(f'{site.cluster}, partition {chosen.label}')}",
        "",
        "# Written by `trnslurm cluster detect --write`. Check run_root and python, then test them",
        "# with `trnslurm env check`.",
        f"# Found: {chosen.total} nodes ({chosen.up} up), {chosen.cpus} CPUs, {memory} each; "
        f"accounting {accounting}.",
        *_others(site, chosen),
        "scheduler: slurm",
        *_type_lines(chosen, own),
        "",
        f"# Directories on a file system that all nodes share. {where}.",
        f"run_root: {_scalar(str(found / 'trnslurm-runs'))}",
        f"data_root: {_scalar(str(found / 'trnslurm-data'))}",
        f"# The nodes' Python, with the pinned stack; {whose}.",
        "activate: []",
        f"python: {_scalar(python)}",
        *_sdk_lines(known),
        "",
        *([] if chosen.gpus else _cache_lines(cache)),
        "# submit asks (or needs --yes) above this many node-hours; null: never.",
        "ask_above_node_hours: null",
        "",
        "slurm:",
        *_slurm_lines(site, chosen, known),
        *(
            ["  expedite: true  # after a node failure a job restarts first"]
            if site.expedites
            else []
        ),
        "  data_partition: null  # for `data prepare --submit`, which needs only CPUs",
        f"  bin_dir: {'null' if bin_dir is None else _scalar(bin_dir)}",
    ]
    lines += _corrected(known, chosen) if known else _own_type(own, chosen)
    return "\n".join(lines) + "\n"


def _others(site: DetectedCluster, chosen: Nodes) -> Iterator[str]:
    """Yield comments about the other nodes that the user can have."""
    others = [n for n in site.partitions if n != chosen and not n.unusable]
    if others:
        yield "# Other nodes: trnslurm cluster detect --write --name NAME --partition one of"
        for n in others:
            gpus = f", {n.gpus} GPUs" if n.gpus else ""
            yield f"#   {n.label}: {n.full_nodes} nodes, {n.cpus} CPUs{gpus}"


def slurm_keys(chosen: Nodes, known: InstanceType | None = None) -> dict[str, object]:
    """Return the values of a profile's `slurm` keys for these nodes; None leaves a key out."""
    values: dict[str, object] = {
        "partition": chosen.name,
        "account": chosen.account,
        "qos": chosen.qos,
        "constraint": chosen.constraint,
        "fewest_nodes": chosen.fewest if chosen.fewest > 1 else None,
        "max_nodes": chosen.nodes,
        "job_cpus": chosen.job_cpus,
        "job_gpus": chosen.job_gpus,
        "max_time_min": chosen.max_time_min,
        "default_time_min": chosen.default_time_min,
        "cpus_per_task": chosen.cpus,
        "mem_per_node_mib": chosen.mem_per_node_mib,
        "gpu_type": chosen.gpu_type,
    }
    told = chosen.told.gpus if chosen.told else 0
    if (known and known.gpus != chosen.gpus) or (told and not chosen.gpus):
        values["gpus_per_node"] = chosen.gpus
    if not chosen.exclusive:
        values["exclusive"] = False
    return values


ASK = "trnslurm cluster detect --write --ask-nodes"


def _type_lines(chosen: Nodes, own: str) -> Iterator[str]:
    """Yield the instance type, its source, and what is unknown about it."""
    source = chosen.sources["instance_type"]
    comment = f"  # {source}" if source else ""
    yield f"instance_type: {_scalar(chosen.instance_type or own)}{comment}"
    if chosen.doubt:
        yield f"# instance_type: ?  {chosen.doubt}"
        if not chosen.told:
            yield f"#   {who_knows(chosen)}: {ASK}"


def who_knows(chosen: Nodes) -> str:
    """Return who can fill in what Slurm does not say: the nodes, or for EFA only nodes on AWS."""
    return "on AWS, ask the nodes" if chosen.gpus else "ask the nodes"


def _sdk_lines(known: InstanceType | None) -> list[str]:
    """Return the release of the Neuron SDK, if it is not the default."""
    sdks = known.device.sdks if known else {}
    if not sdks or Cluster.neuron_sdk in sdks:
        return []
    return [f'neuron_sdk: "{next(iter(sdks))}"  # with TorchNeuron']


def _cache_lines(cache: str) -> list[str]:
    return [
        "# Compiled graphs of Neuron devices, on a shared file system. null means each node's",
        "# /var/tmp with PyTorch/XLA (lost with the node), and run_root with TorchNeuron.",
        f"compile_cache: {cache}",
    ]


def _slurm_lines(site: DetectedCluster, chosen: Nodes, known: InstanceType | None) -> Iterator[str]:
    sources = dict(chosen.sources)
    sources["partition"] = "the site's default" if chosen.default else "scontrol show partition"
    sources["max_time_min"] = "MaxTime" if chosen.max_time_min else "the partition has no MaxTime"
    sources["account"] = "the partition does not accept your default account"
    sources["constraint"] = "a feature that the partition's other nodes do not have"
    sources.setdefault("gpu_type", "Gres of its nodes")
    if several := site.of_several_nodes(chosen):
        names = " or ".join(n.label for n in several[:_MOST_NAMED])
        sources["max_nodes"] += f"; detect --partition {names} allows more"
    sources["fewest_nodes"] = "MinNodes of the partition, or the minimum of its QOS"
    values = slurm_keys(chosen, known)
    if "gpus_per_node" in values:
        sources.setdefault("gpus_per_node", "Gres of its nodes")
    always = ("partition", "max_nodes", "max_time_min", "cpus_per_task")
    for key, value in values.items():
        if value is None and key not in always:
            continue
        text = "null" if value is None else json.dumps(value)
        yield f"{f'  {key}: {text}':<{_COMMENT_AT}}  # {sources[key]}"
    for question in chosen.questions:
        key, _, says = question.partition("|")
        yield f"  # {key}: ?  {says}"
    if others := site.others_than(chosen):
        yield "  # The same nodes, for jobs that the partition above does not allow."
        yield "  partitions:"
        for other in sorted(others, key=lambda n: (n.max_time_min or math.inf, n.nodes)):
            limits = {"fewest_nodes": other.fewest, "max_nodes": other.nodes,
                      "max_time_min": other.max_time_min}  # fmt: skip
            per_job = {"job_cpus": other.job_cpus, "job_gpus": other.job_gpus}
            limits |= {key: most for key, most in per_job.items() if most}
            yield f"    {_scalar(other.name)}: {json.dumps(limits)}"
    if chosen.mixed:
        yield f"  # constraint: ?  no feature distinguishes these nodes from {chosen.mixed} others"
        yield "  # in the partition that also fit, so Slurm may allocate those"


def _own_name(chosen: Nodes) -> str:
    return re.sub(r"[^\w.-]", "-", chosen.label)


def missing_efa(known: InstanceType | None, chosen: Nodes) -> str:
    """Return that the nodes and their type differ in EFA interfaces; empty if they do not.

    Trainium jobs on more than one node need EFA. Their preflight says how to enable it.
    """
    if known and not chosen.told and chosen.without_efa and known.gpus and known.efa:
        return f"ParallelCluster has not enabled EFA on these {known.name} nodes (Efa/Enabled)"
    if not known or not chosen.told or chosen.told.efa == known.efa:
        return ""
    return (
        f"{chosen.told.host} has {chosen.told.efa} EFA interfaces, but a {known.name} has "
        f"{known.efa}"
    )


def _corrected(known: InstanceType, chosen: Nodes) -> list[str]:
    """Return lines that correct the catalog's entry with what a node has reported."""
    why = missing_efa(known, chosen)
    if not why:
        return []
    number = f"{{efa: {chosen.told.efa if chosen.told else 0}}}"
    return ["", f"# {why}.", "instance_types:", f"  {known.name}: {number}"]


def _own_type(name: str, chosen: Nodes) -> list[str]:
    """Return lines that define an instance type that is missing from the catalog."""
    gpus = chosen.gpus or (chosen.told.gpus if chosen.told else 0)
    device, count = (CUDA, gpus) if gpus else (CPU, chosen.cpus)
    listed = sorted({n for n in (1, 2, 4, 8, 16, count) if n <= count})
    slices = ["    # GPU slices (MIG): NCCL cannot connect them, so there is one worker per node."]
    unset = ["    # host_gib: ?  slurm.conf sets no RealMemory for these nodes"]
    efa = ["    # efa: ?  the number of interfaces per node; 0 if omitted"]
    if chosen.told:
        efa = [f"    efa: {chosen.told.efa}"] if chosen.told.efa else []
    return [
        "",
        "# Not in the catalog. Add efa, bf16_tflops and price_per_hour if you know them.",
        "instance_types:",
        f"  {_scalar(name)}:",
        f"    device: {device}",
        *(slices if chosen.sliced else []),
        *(efa if gpus and (chosen.told or chosen.doubt) else []),
        f"    accelerators: {max(gpus, 1)}",
        f"    workers: {listed}",
        f"    multi_node_workers: {listed}",
        f"    vcpus: {chosen.cpus}",
        *([] if chosen.memory_mib else unset),
        f"    host_gib: {chosen.memory_mib // 1024}",
    ]


def _scalar(text: str) -> str:
    return json.dumps(text)  # any JSON string is a YAML one


def find_shared() -> Path | None:
    """Return a directory of this user that the nodes seem to share with this host, or None.

    A login node mounts the cluster's file systems just as the nodes do. ParallelCluster's head node
    has /home on a local disk and exports it, so exported directories count too.
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
    """Yield every mount point and its type; a later mount on the same point takes precedence."""
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
    r"""Return a path with escapes replaced, such as \040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
