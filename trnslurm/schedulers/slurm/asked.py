"""What a batch script requests from Slurm and which keys set it, to explain rejections."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trnslurm.errors import SlurmError
from trnslurm.schedulers.interface import BatchScript
from trnslurm.slurm.commands import Slurm

_NODES = "sinfo -o '%P %D %N %c %m %G %f' lists partitions and nodes"
NO_SUCH_NODE = "node configuration is not available"
SUBMIT_LIMIT = "submitjob"
"""Part of the reasons for too many jobs: AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit."""
QUEUE_FULL = ("maxjobcount limit", "resource temporarily unavailable")
"""What --test-only prints for too many jobs of all users: Slurm 26.11, and 22.05 (EAGAIN)."""
_FULL = (
    "MaxJobCount, see scontrol show config: it counts the jobs of all users, even those that ended "
    "within MinJobAge; submit fewer jobs at once, or later"
)
# Part of sbatch's message -> what to do about the rejection, and the options that cause it
# (seen on Slurm 22.05).
_HINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    SUBMIT_LIMIT: (
        "waiting jobs count too; sacctmgr show assoc user=$USER format=account,maxsubmitjobs and "
        "sacctmgr show qos format=name,maxsubmitjobspu print the limits",
        (),
    ),
    **dict.fromkeys(QUEUE_FULL, (_FULL, ())),
    "accounting/qos policy": (
        "sacctmgr show qos lists the limits of each QOS",
        ("qos", "account", "nodes", "cpus-per-task", "gpus-per-node", "time"),
    ),
    "time limit": ("set slurm.max_time_min to what the partition allows", ()),
    "invalid partition": ("", ("partition",)),
    "group not permitted": ("", ("partition",)),
    "invalid feature": ("no node has a feature of slurm.constraint", ("constraint",)),
    "invalid generic resource": ("no node has these GPUs as a GRES", ("gpus-per-node", "gres")),
    "invalid account": ("sacctmgr show assoc user=$USER lists yours", ("account", "partition")),
    "invalid qos": ("sacctmgr show assoc user=$USER lists yours", ("qos",)),
    "reservation is invalid": ("scontrol show reservation lists them", ("reservation",)),
    "memory specification": ("no node has that much", ("mem",)),
    "node count specification": ("the partition allows a different number", ("nodes",)),
    "more processors requested": (
        "the partition has too few nodes, or too few CPUs",
        ("nodes", "cpus-per-task"),
    ),
    NO_SUCH_NODE: (
        "no node has what the job asks for",
        ("cpus-per-task", "gpus-per-node", "constraint", "gres", "mem"),
    ),
}
# What a site's own rules (job_submit.lua) may name, and the keys that set it.
_OF_THE_SITE = {
    r"\baccounts?\b": "slurm.account",
    r"\bpartitions?\b|\bqueues?\b": "slurm.partition",
    r"\bqos\b": "slurm.qos",
    r"\bmem(ory)?\b": "slurm.mem_per_node_mib (null omits it)",
    r"\bgpus?\b|\bgres\b": "slurm.gpus_per_node and slurm.gpu_type",
    r"\bcpus?\b|\bcores?\b|\bcpus-per-task\b": "slurm.cpus_per_task (0 omits it)",
    r"\btime\b|\bwall-?(time|clock)\b": "--time",
    r"\bconstraints?\b|\bfeatures?\b": "slurm.constraint",
}
_SBATCH = ".sbatch"
_WANTED = ("account", "qos")
"""Options that a site may require even if the user has a default."""
_OF_INSTANCE_TYPE = ("cpus-per-task", "gpus-per-node")
_OPTION = re.compile(rb"^#SBATCH --([\w-]+)(?:=([\"']?)(\S+?)\2)?(?=\s|$)", re.MULTILINE)
_MOST_KINDS = 3
_FOR_ALL = ("time", "account", "qos", "mem")
"""Options that apply to all components of a heterogeneous job, unless a component sets its own."""


class Asked(BatchScript):
    """A batch script, parsed for what it requests from Slurm."""

    @property
    def components(self) -> list[Asked]:
        """The job's components, each with the options that apply to it.

        Only a heterogeneous job has more than one.
        """
        first, *others = re.split(rb"(?m)^#SBATCH hetjob$", self.script)
        kept = [m for m in _OPTION.finditer(first) if m[1].decode() in _FOR_ALL]
        for_all = b"".join(m[0] + b"\n" for m in kept)
        parts = [b"#!/bin/bash\n" + other + b"\n" + for_all for other in others]
        return [replace(self, script=part) for part in (first, *parts)]

    def value(self, option: str) -> str:
        """Return the value of an option without quotes; empty if the script does not set it."""
        found = (m for m in _OPTION.finditer(self.script) if m[1].decode() == option)
        return next(((m[3] or b"").decode() for m in found), "")

    def has(self, option: str) -> bool:
        """Check whether the script has an option, with or without a value."""
        return any(m[1].decode() == option for m in _OPTION.finditer(self.script))

    def is_refusal(self, words: str) -> bool:
        """Check whether Slurm's message is known to reject a job, rather than to delay it."""
        return any(part in words.lower() for part in _HINTS)

    def explain(self, words: str, slurm: Slurm) -> str:
        """Return Slurm's rejection with the keys that caused it and what is available instead."""
        for part, (hint, options) in _HINTS.items():
            if part in words.lower():
                of_nodes = options and " lists " not in hint
                there = self._what_there_is(slurm) if of_nodes else ""
                lacks = [o for o in options[:1] if o in _WANTED and not self.has(o)]
                unset = "".join(f"{self._key(option)} is not set" for option in lacks)
                known = filter(None, [hint, unset, self.keys(options), there])
                return f"{words} ({'; '.join(known)})"
        named = [key for rule, key in _OF_THE_SITE.items() if re.search(rule, words.lower())]
        return f"{words} (set by {', '.join(named)})" if named else words

    def keys(self, options: Sequence[str]) -> str:
        """Return the keys that set these options, with their values and where they are set."""
        found: dict[str, list[str]] = {}
        for option in options:
            asks = rb"(?m)^#SBATCH --%b=(\S+)(?: +# (roles\..+)$)?" % option.encode()
            value = re.search(asks, self.script)
            if not value:
                continue
            key = value[2].decode() if value[2] else self._key(option)
            own = key in self.origins or option not in _OF_INSTANCE_TYPE
            place = self.origins.get(key if own else "instance_type", "")
            place = place.removeprefix("cluster profile: ")
            by = "" if own else f", from instance_type {self.instance_type}"
            said = f"--{option}={value[1].decode()}" if key.endswith(_SBATCH) else value[1].decode()
            found.setdefault(place, []).append(f"{key} is {said}{by}")
        texts = (f"{place}: {', '.join(asked)}" for place, asked in found.items())
        return "; ".join(text.lstrip(": ") for text in texts)

    def _key(self, option: str) -> str:
        keys = {
            "nodes": ["--nodes"],
            "gres": ["slurm.sbatch"],
            "mem": ["slurm.mem_per_node_mib", "slurm.sbatch"],
            "time": ["slurm.time_min", "slurm.default_time_min", "--time"],
        }.get(option, [f"slurm.{option.replace('-', '_')}"])
        return next((key for key in keys if key in self.origins), keys[-1])

    def partitions(self, every: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        """Return the script's partitions that exist, only the ones that are UP if there are any."""
        names = [*filter(None, self.value("partition").split(","))]
        found = [
            fields
            for fields in every
            if (fields.get("PartitionName") in names if names else fields.get("Default") == "YES")
        ]
        return [fields for fields in found if fields.get("State", "UP") == "UP"] or found

    def _what_there_is(self, slurm: Slurm) -> str:
        """Return the nodes of the script's partition, or the partitions if it does not exist."""
        try:
            every = slurm.show("partition")
            partitions = self.partitions(every)
            if not partitions:
                return f"the partitions are {', '.join(p['PartitionName'] for p in every)}"
            names = [partition["PartitionName"] for partition in partitions]
            nodes = nodes_of(names, slurm)
        except (SlurmError, KeyError):
            return _NODES
        kinds = Counter(map(_kind, nodes))
        has = "; ".join(
            f"{many} node{'' if many == 1 else 's'} with {kind}"
            for kind, many in kinds.most_common(_MOST_KINDS)
        )
        return f"partition {','.join(names)} has {has or 'no nodes'}"


def nodes_of(partitions: Sequence[str], slurm: Slurm) -> list[dict[str, str]]:
    """Return the nodes of partitions."""
    names = {*partitions}
    return [n for n in slurm.show("node") if names & {*n.get("Partitions", "").split(",")}]


def _kind(node: Mapping[str, str]) -> str:
    """Return what a node offers."""
    own = [f"{node.get('CPUTot', '?')} CPUs", f"{node.get('RealMemory', '?')} MB"]
    own.append(_or_none("GRES", node.get("Gres")))
    return ", ".join([*own, _or_none("feature", node.get("AvailableFeatures"))])


def _or_none(what: str, value: str | None) -> str:
    return f"no {what}" if value in (None, "", "(null)") else f"{what} {value}"
