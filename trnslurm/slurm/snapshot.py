"""What Slurm's controller tells this user about a cluster, queried once and kept as a file.

`cluster detect --dump` writes the file. `cluster detect --from` and `sandbox up --like` read it. It
contains the names of nodes, partitions and accounts, and limits, but no addresses, paths or other
users.
"""

from __future__ import annotations

import functools
import getpass
import grp
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from trnslurm.contract.files import newer_format
from trnslurm.errors import ConfigError, SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.commands import TIMEOUT_S, Slurm

FORMAT = 1
# What shapes jobs: slurm.conf(5).
CONFIG = (
    *("AccountingStorageEnforce", "AccountingStorageType", "ClusterName", "DefMemPerCPU"),
    *("DefMemPerGPU", "DefMemPerNode", "EnforcePartLimits", "GresTypes", "JobRequeue", "KillWait"),
    *("JobDefaults", "JobSubmitPlugins", "LaunchParameters", "MaxArraySize", "MaxJobCount"),
    *("MaxMemPerCPU", "MaxMemPerNode"),
    *("OverTimeLimit", "PreemptMode", "PreemptType", "PriorityType", "SLURM_VERSION"),
    *("SchedulerParameters", "SelectType", "SelectTypeParameters", "SlurmctldParameters"),
    *("SlurmdTimeout", "TaskPlugin"),
)
NODE = (
    *("ActiveFeatures", "AvailableFeatures", "Boards", "CPUEfctv", "CPUSpecList", "CPUTot"),
    *("CoreSpecCount", "CoresPerSocket", "Gres", "MemSpecLimit", "NodeName", "Partitions"),
    *("RealMemory", "Sockets", "State", "ThreadsPerCore", "TmpDisk", "Weight"),
    "InstanceType",  # of HyperPod's nodes, by its own file
)
# On every node of a cluster that SageMaker HyperPod made (awslabs/awsome-distributed-ai,
# 1.architectures/5.sagemaker-hyperpod: Extensions/detect-node, tools/devops-agent/docs).
HYPERPOD = Path("/opt/ml/config/resource_config.json")
ASSOCIATIONS = "DefaultAccount,Cluster,Account,Partition,QOS,DefaultQOS,GrpTRES,MaxTRES,MaxWall"
_GROUP = ASSOCIATIONS.split(",").index("GrpTRES")
_ACCOUNTS = "Cluster,Account,ParentName,GrpTRES"
QOS = "Name,GrpTRES,MaxTRES,MaxTRESPU,MaxWall,MinTRES"
_MOST_BYTES = 64 << 20
_COUNTS = (
    *("CPUTot", "CoreSpecCount", "CoresPerSocket", "MemSpecLimit", "RealMemory", "Sockets"),
    "ThreadsPerCore",
)

Fields = Mapping[str, str]
Rows = Sequence[Sequence[str]]


class Snapshot(Frozen):
    """A cluster as its controller describes it to one user."""

    config: Fields
    partitions: Sequence[Fields]
    nodes: Sequence[Fields]
    associations: Rows | None = None
    """This user's associations only, or None if sacctmgr gave no answer."""
    qos: Rows = ()
    groups: Sequence[str] | None = None
    """This user's groups that partitions name, or None for root, who may use every partition."""

    @classmethod
    def take(cls, slurm: Slurm) -> Self:
        """Query the controller, and accounting if there is any."""
        config = slurm.configuration()
        nodes, partitions = slurm.show("node"), slurm.show("partition")
        groups = own_groups(partitions)
        partitions = [each for each in partitions if _is_for(each, groups)]
        types = _types_of_hyperpod()
        nodes = [
            node | {"InstanceType": types.get(node["NodeName"], "")}
            for node in nodes
            if node.get("Partitions")
        ]
        associations: Rows | None = None
        qos: Rows = ()
        if "slurmdbd" in config.get("AccountingStorageType", "") and slurm.find("sacctmgr"):
            associations, qos = _accounting(slurm, config.get("ClusterName", ""))
        return cls(
            config={key: config[key] for key in CONFIG if key in config},
            partitions=partitions,
            nodes=[{key: node[key] for key in NODE if node.get(key)} for node in nodes],
            associations=associations,
            qos=qos,
            groups=groups,
        )

    @classmethod
    def of_accounts(cls, slurm: Slurm, *, timeout_s: float) -> Self:
        """Query only the limits of accounts and QOS, if they are enforced."""
        config = slurm.configuration()
        seen = cls(config=config, partitions=(), nodes=())
        if not limits_jobs(config) or not slurm.find("sacctmgr"):
            return seen
        associations, qos = _accounting(slurm, config.get("ClusterName", ""), timeout_s=timeout_s)
        return replace(seen, associations=associations, qos=qos)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `to_json` wrote. The file is not trusted."""
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise ConfigError(
                    f"{file}: too large to be a dump by `trnslurm cluster detect --dump`"
                )
            tree = json.loads(file.read_text(encoding="utf-8"))
            if words := newer_format(tree, FORMAT):
                raise ConfigError(f"{file} was {words}")
            return cls.parse(tree)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{file}: not written by `trnslurm cluster detect --dump`") from None

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Self:
        """Return the snapshot of a file's content; raise a ValueError if it is not valid."""
        if tree["format"] != FORMAT:
            raise ValueError(tree["format"])
        rows = tree["associations"]
        return cls(
            config=_fields(tree["config"]),
            partitions=[_fields(each, "PartitionName") for each in tree["partitions"]],
            nodes=[_fields(each, "NodeName", "Partitions") for each in tree["nodes"]],
            associations=None if rows is None else _table(rows, ASSOCIATIONS),
            qos=_table([_with_least(row) for row in tree["qos"]], QOS),
            groups=None if tree["groups"] is None else _words(tree["groups"]),
        )

    def tree(self) -> dict[str, Any]:
        """Return the file's content as a tree."""
        return {
            "format": FORMAT,
            "config": dict(self.config),
            "partitions": [dict(each) for each in self.partitions],
            "nodes": [dict(each) for each in self.nodes],
            "associations": self.associations,
            "qos": self.qos,
            "groups": self.groups,
        }

    def to_json(self) -> str:
        """Return the file's content as JSON."""
        return json.dumps(self.tree(), indent=1) + "\n"


def limits_jobs(config: Fields) -> bool:
    """Check whether the limits of accounts and QOS are enforced; `safe` implies that."""
    enforced = config.get("AccountingStorageEnforce", "").lower()
    return "limits" in enforced or "safe" in enforced


def _is_for(partition: Fields, groups: Sequence[str] | None) -> bool:
    """Check whether a partition is open to these groups; Slurm hides the others without --all."""
    allowed = partition.get("AllowGroups", "ALL")
    return groups is None or allowed == "ALL" or bool({*groups} & {*allowed.split(",")})


def _types_of_hyperpod() -> dict[str, str]:
    """Return the instance types of HyperPod's nodes by their Slurm names; empty without HyperPod.

    A node is named after its address, or after its instance (GROUP-1) with UseInstanceNames.
    """
    found: dict[str, str] = {}
    try:
        for group in json.loads(HYPERPOD.read_text(encoding="utf-8"))["InstanceGroups"]:
            kind = re.sub(r"[^\w.-]", "", group["InstanceType"])
            for instance in group.get("Instances") or ():
                address = str(instance.get("CustomerIpAddress")).replace(".", "-")
                found |= {f"ip-{address}": kind, str(instance.get("InstanceName")): kind}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def own_groups(partitions: Sequence[Fields]) -> list[str] | None:
    """Return those of this user's groups that partitions name, or None for root."""
    if os.getuid() == 0:
        return None
    asked = {g for fields in partitions for g in fields.get("AllowGroups", "").split(",")}
    names = set()
    for number in {os.getgid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:  # this host does not know its name
            continue
    return sorted(asked & names)


def _accounting(
    slurm: Slurm, cluster: str, *, timeout_s: float = TIMEOUT_S
) -> tuple[list[list[str]] | None, list[list[str]]]:
    """Return this user's associations and every QOS; None if sacctmgr gives no answer."""
    rows = functools.partial(_rows, slurm, timeout_s=timeout_s)
    try:
        # https://slurm.schedmd.com/sacctmgr.html: withassoc gives a line per association
        users = rows("user", getpass.getuser(), "withassoc", columns=ASSOCIATIONS)
        every = rows("qos", columns=QOS)
    except SlurmError:
        return None, []
    own = [row for row in users if row[1].lower() == cluster.lower()]
    try:
        accounts = rows("assoc", "user=", columns=_ACCOUNTS)
    except SlurmError:
        return own, every
    above = {row[1]: row[2:] for row in accounts if row[0].lower() == cluster.lower()}
    return [_within(row, above) for row in own], every


def _within(row: list[str], above: Mapping[str, Sequence[str]]) -> list[str]:
    """Return an association with the lowest GrpTRES of the association, its account and the
    accounts above."""
    account, limits = row[2], [row[_GROUP]]
    for _ in range(len(above)):
        if account in above:
            account, limit = above[account]
            limits.append(limit)
    least: dict[str, str] = {}
    for word in filter(None, ",".join(limits).split(",")):
        name, _, most = word.partition("=")
        if name not in least or _size(most) < _size(least[name]):
            least[name] = most
    return [*row[:_GROUP], ",".join(f"{n}={most}" for n, most in least.items()), *row[_GROUP + 1 :]]


def _size(text: str) -> float:
    """Return a number that may have a unit, such as 750G."""
    found = re.fullmatch(r"(\d+)([MGTP]?)", text)
    return int(found[1]) * 1024.0 ** "MGTP".find(found[2]) if found else float("inf")


def _rows(slurm: Slurm, *words: str, columns: str, timeout_s: float) -> list[list[str]]:
    asked = ("-nP", "show", *words, f"format={columns}")
    text = slurm.call("sacctmgr", *asked, timeout_s=timeout_s)
    width = columns.count(",") + 1
    rows = (line.split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == width]


def _fields(tree: Mapping[str, str], *needed: str) -> dict[str, str]:
    """Return validated fields: all are strings, counts are numbers, `needed` ones exist."""
    fields = {_word(key): _word(value) for key, value in tree.items()}
    bad = [key for key in _COUNTS if not re.fullmatch(r"\d{1,12}", fields.get(key, "0"))]
    if bad or any(not fields.get(key) for key in needed):
        raise ValueError(bad)
    return fields


def _table(rows: Rows, columns: str) -> list[list[str]]:
    """Return rows after checking that each has as many words as the table has columns."""
    table = [_words(row) for row in rows]
    if any(len(row) != columns.count(",") + 1 for row in table):
        raise ValueError(columns)
    return table


def _with_least(row: Sequence[str]) -> Sequence[str]:
    """Return a QOS row; older files have no MinTRES column."""
    return [*row, ""] if len(row) == QOS.count(",") else row


def _words(row: Sequence[str]) -> list[str]:
    return [_word(word) for word in row]


def _word(text: str) -> str:
    if not re.fullmatch(r"[ -~]*", text):
        raise ValueError(text)
    return text
