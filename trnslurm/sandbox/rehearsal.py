"""A sandbox modeled on the cluster in a file, from `cluster detect --dump` or ParallelCluster.

Not everything is possible here: not cgroups, nodes that power up on demand, or partitions that
accept jobs only from certain hosts. A partition accepts jobs of every group if the user's group is
among its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trnslurm.config.catalog import catalog
from trnslurm.errors import SandboxError, SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.detect import Nodes, detect, features_of, whole_number
from trnslurm.slurm.parallelcluster import is_cluster_file, read_cluster_file
from trnslurm.slurm.reasons import UNUSABLE, node_state
from trnslurm.slurm.snapshot import Fields, Snapshot

ALL_NODES, OF_A_KIND = 16, 4
"""A cluster of up to the first number of nodes is complete here. A larger one has the second number
of nodes of each kind."""
_NODE_NAME = r"(?a)[A-Za-z0-9][\w.-]{0,62}"
# What scontrol shows if nothing is set.
_UNSET = ("(null)", "NONE", "N/A", "UNLIMITED", "ALL", "NO", "")
_SHOWN = {
    ("AccountingStorageEnforce", "none"),  # which slurm.conf must not contain
    ("PreemptMode", "OFF"),
    ("PreemptType", "preempt/none"),
}
_CONFIG = (
    *("AccountingStorageEnforce", "DefMemPerCPU", "DefMemPerGPU", "DefMemPerNode"),
    *("EnforcePartLimits", "JobRequeue", "KillWait", "MaxArraySize", "MaxJobCount"),
    *("MaxMemPerCPU", "MaxMemPerNode", "OverTimeLimit", "PreemptMode", "PreemptType"),
    *("PriorityType", "SchedulerParameters", "SelectType", "SelectTypeParameters"),
    "SlurmdTimeout",
)
# From slurm.conf(5), without those about other hosts (AllocNodes) and sums (TotalNodes).
_PARTITION = (
    *("AllowAccounts", "AllowGroups", "AllowQos", "Default", "DefaultTime", "DefMemPerCPU"),
    *("DefMemPerNode", "DenyAccounts", "DenyQos", "ExclusiveUser", "GraceTime", "Hidden"),
    *("LLN", "MaxCPUsPerNode", "MaxCPUsPerSocket", "MaxMemPerCPU"),
    *("MaxMemPerNode", "MaxNodes", "MaxTime", "MinNodes", "OverSubscribe", "OverTimeLimit"),
    *("PreemptMode", "PriorityJobFactor", "PriorityTier", "QoS", "ReqResv", "RootOnly"),
    *("SelectTypeParameters", "State", "TRESBillingWeights"),
)
_JOB_DEFAULT = re.compile(r"(Def(?:Cpu|Mem)PerGPU)=(\d+)")
_DEFAULTS = {"GraceTime": "0", "MinNodes": "0", "State": "UP"}
_DEFAULTS |= {"PriorityJobFactor": "1", "PriorityTier": "1"}


class Gres(Frozen):
    """Generic resources of a node, of one type."""

    name: str
    kind: str
    count: int

    def __str__(self) -> str:
        return ":".join(filter(None, (self.name, self.kind, str(self.count))))


class Rehearsal:
    """A sandbox's selection of a cluster's nodes, and the cluster's settings."""

    def __init__(self, seen: Snapshot) -> None:
        self._seen = seen
        self.names = [node["NodeName"] for node in seen.nodes]

    @classmethod
    def of(cls, file: Path, most: int | None) -> Rehearsal:
        """Use the nodes of a cluster, at most this many of each kind."""
        if is_cluster_file(file):
            seen, *_ = read_cluster_file(file, catalog())
        else:
            seen = Snapshot.load(file)
        if most is None:
            most = len(seen.nodes) if len(seen.nodes) <= ALL_NODES else OF_A_KIND
        found: dict[tuple[str | None, ...], int] = {}
        chosen = set()
        for node in sorted(seen.nodes, key=_is_unusable):
            name = node.get("NodeName", "")
            if not re.fullmatch(_NODE_NAME, name):
                raise SandboxError(f"{file}: {name!r} is not a valid node name")
            keys = ("Partitions", "Gres", "CPUTot", "RealMemory", "AvailableFeatures")
            kind = tuple(node.get(key) for key in keys)
            found[kind] = found.get(kind, 0) + 1
            if found[kind] <= most:
                chosen.add(name)
        kept = [node for node in seen.nodes if node["NodeName"] in chosen]
        if not kept:
            raise SandboxError(f"{file} contains no nodes")
        return cls(Snapshot.parse({**seen.tree(), "nodes": kept}))

    @property
    def seen(self) -> Snapshot:
        """The cluster, with only the sandbox's nodes."""
        return self._seen

    @property
    def has_accounting(self) -> bool:
        """Whether the snapshot contains data from the cluster's accounting."""
        return self._seen.associations is not None

    @property
    def unusable(self) -> set[str]:
        """The nodes that are down or drained on the cluster."""
        return {node["NodeName"] for node in self._seen.nodes if _is_unusable(node)}

    def words(self) -> dict[str, dict[str, str]]:
        """Return the words on each node's line in slurm.conf."""
        return {node["NodeName"]: _words(node) for node in self._seen.nodes}

    def config(self) -> dict[str, str]:
        """Return the lines of slurm.conf that are not about nodes and partitions."""
        found = {}
        for key in _CONFIG:
            # With units, as in "30 sec".
            value = re.sub(r"^(\d+) (sec|min)$", r"\1", self._seen.config.get(key, ""))
            if value in _UNSET or (key, value) in _SHOWN:
                continue
            if " " in value:
                raise SandboxError(f"{key}: {value!r} is not a valid word in slurm.conf")
            found[key] = value.replace("select/cons_res", "select/cons_tres")
        found |= dict(_JOB_DEFAULT.findall(self._seen.config.get("JobDefaults", "")))
        if not self.has_accounting:
            found.pop("AccountingStorageEnforce", None)
        kinds = {g.name for node in self._seen.nodes for g in _own_gres(node)}
        found |= {"GresTypes": ",".join(sorted(kinds))} if kinds else {}
        rows = [*self._seen.qos, *(self._seen.associations or ())]
        counted = {
            name for row in rows for name in re.findall(r"\b(gres/[\w.:-]+)=", ",".join(row))
        }
        return found | ({"AccountingStorageTRES": ",".join(sorted(counted))} if counted else {})

    def partitions(self) -> dict[str, str]:
        """Return the line of each partition in slurm.conf."""
        return {p["PartitionName"]: self._partition(p) for p in self._seen.partitions}

    def _partition(self, fields: Fields) -> str:
        name = fields["PartitionName"]
        nodes = [n["NodeName"] for n in self._seen.nodes if name in n["Partitions"].split(",")]
        words = {"PartitionName": name} | ({"Nodes": ",".join(nodes)} if nodes else {})
        for key in _PARTITION:
            value = fields.get(key, "")
            if value not in _UNSET and value != _DEFAULTS.get(key):
                words[key] = value
        # Slurm shows these together; slurm.conf has a key for each.
        words |= dict(_JOB_DEFAULT.findall(fields.get("JobDefaults", "")))
        if "PreemptType" not in self.config():
            words.pop("PreemptMode", None)
        groups = self._seen.groups
        if groups is None or {*groups} & {*words.get("AllowGroups", "").split(",")}:
            words.pop("AllowGroups", None)
        if not self.has_accounting:
            words.pop("QoS", None)
        bad = [word for word in words.values() if " " in word]
        if bad:
            raise SandboxError(f"partition {name}: {bad[0]!r} is not a valid word in slurm.conf")
        return " ".join(f"{key}={value}" for key, value in words.items())

    def accounts(self, user: str) -> Iterator[list[str]]:
        """Yield sacctmgr's arguments that add the QOS, and the user's accounts."""
        for name, *_ in self._seen.qos:
            if name != "normal":  # this one exists already
                yield ["add", "qos", name]
        rows = self._seen.associations or ()
        for account in dict.fromkeys(row[2] for row in rows if row[2] != "root"):
            yield ["add", "account", account]
        for row in rows:
            if (row[2], row[3]) != ("root", ""):
                yield ["add", "user", user, *_where(row)]
        for default in {row[0] for row in rows} - {"root"}:
            yield ["modify", "user", user, "set", f"defaultaccount={default}"]

    def limits(self, user: str) -> Iterator[list[str]]:
        """Yield the arguments that set limits, after slurmctld has reported its GRES."""
        names = ("GrpTRES", "MaxTRESPerJob", "MaxTRESPerUser", "MinTRESPerJob")
        for name, *tres, wall, least in self._seen.qos:
            if limits := _limits(names, (*tres, least), wall):
                yield ["modify", "qos", name, "set", *limits]
        for row in self._seen.associations or ():
            *_, qos, first, group, most, wall = row
            settings = _limits(("GrpTRES", "MaxTRESPerJob"), (group, most), wall)
            settings += [f"qos={qos}"] if qos else []
            settings += [f"defaultqos={first}"] if first else []
            if settings:
                yield ["modify", "user", user, "where", *_where(row), "set", *settings]

    def best(self) -> Nodes | None:
        """Return the likely nodes for training."""
        try:
            return detect(self._seen, catalog()).best()
        except SlurmError:  # no partition accepts this user's jobs
            return None


def gres_of(text: str) -> list[Gres]:
    """Return the resources that scontrol shows as `gpu:a100:4(S:0-1),nvme:1`."""
    found = []
    for word in re.split(r",(?![^(]*\))", text):
        name, *words = re.sub(r"\(.*", "", word).split(":")
        number = whole_number(words.pop()) if words else None
        kinds = [kind for kind in words if kind != "no_consume"]
        if number and len(kinds) <= 1:
            found.append(Gres(name=name, kind="".join(kinds), count=number))
    return found


def _own_gres(node: Fields) -> list[Gres]:
    """Return a node's generic resources, except the shares of its GPUs."""
    return [g for g in gres_of(node.get("Gres", "")) if g.name not in ("mps", "shard")]


def _words(node: Fields) -> dict[str, str]:
    shape = {key: whole_number(node.get(key)) or 1 for key in ("Sockets", "CoresPerSocket")}
    shape["ThreadsPerCore"] = whole_number(node.get("ThreadsPerCore")) or 1
    cpus = whole_number(node.get("CPUTot")) or 1
    cores = shape["Sockets"] * shape["CoresPerSocket"]
    words = {"CPUs": str(cpus)}
    if cpus in (cores, cores * shape["ThreadsPerCore"]):
        words |= {key: str(number) for key, number in shape.items()}
    for key in ("RealMemory", "TmpDisk", "Weight", "CoreSpecCount", "MemSpecLimit"):
        if number := whole_number(node.get(key)):
            words[key] = str(number)
    if features := features_of(node):
        words["Feature"] = ",".join(features)
    if gres := _own_gres(node):
        words["Gres"] = ",".join(map(str, gres))
    if any(" " in word for word in words.values()):
        raise SandboxError(
            f"node {node['NodeName']}: {words} contains a word that is not valid in slurm.conf"
        )
    return words | ({"State": "DRAIN", "Reason": "as-there"} if _is_unusable(node) else {})


def _is_unusable(node: Fields) -> bool:
    return node_state(node.get("State", "")) in UNUSABLE


def _where(row: Sequence[str]) -> list[str]:
    return [f"account={row[2]}", *([f"partition={row[3]}"] if row[3] else [])]


def _limits(keys: Sequence[str], values: Sequence[str], wall: str) -> list[str]:
    found = [f"{key}={value}" for key, value in zip(keys, values, strict=True) if value]
    return found + ([f"MaxWall={wall}"] if wall else [])
