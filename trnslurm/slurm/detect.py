"""Reads from Slurm's controller which nodes this user's jobs can have, and under which limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trnslurm.config.catalog import InstanceType, ec2_name, is_accelerated, types_of_size
from trnslurm.devices.gpu import is_of_other_maker
from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.slurm.access import Access, Grant, Limits, grant, mebibytes, minutes, read_access
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.reasons import UNUSABLE, node_state
from trnslurm.slurm.snapshot import Snapshot

# Names that NVML and sites give to slices of a GPU (MIG): 1g.10gb, nvidia_a100_80gb_pcie_3g.40gb.
_SLICE = re.compile(r"(?i)(^|[^a-z0-9])(\d+g[._-]?\d+gb|mig)")
_FEATURE = re.compile(r"[\w.:-]+")
_HYPERPOD = "resource_config.json of HyperPod"
_OF_THE_NODE = (_HYPERPOD, "feature")
# EC2's name of a host: ip-10-1-4-244.
_EC2_HOST = re.compile(r"ip(-\d{1,3}){4}")
_SHORT_MIN = 120
"""A partition that allows no more time than this is for tests."""
# Names of nodes, partitions and features at sites whose GPUs are not a GRES.
_NAMES_GPUS = re.compile(r"(?i)(^|[^a-z])(gpu|dgx|hgx|nvidia|(rtx|[av]100|h[12]00)([^a-z0-9]|$))")
# What the nodes of two partitions must have in common to share a profile.
_SAME = ("cpus", "gpus", "gpu_type", "instance_type", "memory_mib", "mem_per_node_mib",
         "exclusive", "constraint", "mixed", "account", "qos")  # fmt: skip


class Gpus(Frozen):
    """The GPUs on one node that a job can use together."""

    number: int = 0
    kind: str = ""
    """The GRES type; empty if there is none."""
    sliced: bool = False
    """Whether they are slices (MIG). A process can use only one slice."""


class Told(Frozen):
    """What a node reports about itself."""

    host: str
    instance_type: str | None
    """EC2's name for the type, or None outside EC2 and on old (Xen) instances."""
    efa: int
    """The number of EFA interfaces."""
    gpus: int
    """The GPUs that NVIDIA's driver finds, even if they are not a GRES."""
    gpu: str
    """The GPUs' model."""
    neuron_devices: int
    interfaces: tuple[str, ...]
    """The network interfaces."""
    hyperpod: bool
    """Whether SageMaker HyperPod created the node."""
    slurm: str
    """The version of the node's Slurm; empty if Slurm was not found."""


class Nodes(Frozen):
    """Identical nodes of one partition, as this user's jobs can have them."""

    name: str
    """The partition."""
    label: str
    """The partition, and what distinguishes these nodes from the partition's other nodes."""
    default: bool
    hidden: bool
    """Whether the site hides the partition from its users, who may still use it."""
    nodes: int
    """The maximum number of nodes of a job, even if it uses only part of each node."""
    job_cpus: int | None
    """The maximum number of CPUs of a job over all its nodes, if less than all nodes have."""
    job_gpus: int | None
    """The maximum number of GPUs of a job over all its nodes, if less than all nodes have."""
    fewest: int
    """The minimum number of nodes of a job."""
    preempts: bool
    """Whether the partition's jobs can be ended to make room for others."""
    up: int
    total: int
    cpus: int
    accelerators: int
    """The number of GPUs or Neuron devices per node."""
    gpus: int
    gpu_type: str | None
    """The GPUs' type, if the GRES has one."""
    sliced: bool
    memory_mib: int
    """The memory of a node that a job can have, or 0 if unknown."""
    mem_per_node_mib: int | None
    """The memory to request: 0 is all of it, None leaves Slurm's default."""
    exclusive: bool
    """Whether a job can have all of a node."""
    max_time_min: int | None
    default_time_min: int | None
    instance_type: str | None
    """None if the type is unknown or missing from the catalog."""
    doubt: str
    """What Slurm does not say about devices and EFA, and a node could; empty if nothing."""
    without_efa: bool
    """Whether EFA is not enabled in ParallelCluster: the nodes lack the feature `efa`."""
    node: str
    """The first idle node, or the first node if none is idle."""
    told: Told | None = None
    """What `node` reports about itself, or None if it was not asked."""
    constraint: str | None
    mixed: int
    """The number of other nodes that Slurm may also give to a job."""
    account: str | None
    qos: str | None
    sources: Mapping[str, str]
    """Key -> where its value comes from."""
    questions: tuple[str, ...]
    """Keys that Slurm does not determine: `key|what Slurm says`."""
    unusable: str
    """Why this user's jobs cannot have these nodes; empty if they can."""

    @property
    def full_nodes(self) -> int:
        """The maximum number of nodes if a job uses everything that it can have on each node."""
        pairs = ((self.job_gpus, self.gpus), (self.job_cpus, self.cpus))
        return min([self.nodes, *(max(1, most // each) for most, each in pairs if most and each)])

    @property
    def takes_trainings(self) -> bool:
        """Whether the partition allows more time than a test needs."""
        return self.max_time_min is None or self.max_time_min > _SHORT_MIN


class DetectedCluster(Frozen):
    """A cluster as its controller describes it."""

    cluster: str
    accounting: bool
    expedites: bool
    """Whether Slurm restarts jobs with --requeue=expedite first after a node failure."""
    partitions: tuple[Nodes, ...]

    def others_than(self, chosen: Nodes) -> list[Nodes]:
        """Return the same nodes in other partitions that allow what the chosen one does not.

        Jobs need no other options there. Partitions whose jobs can be preempted and partitions for
        tests are left out, because the user should choose those.
        """
        time = chosen.max_time_min or math.inf
        return [
            n
            for n in self.partitions
            if _instead(n, chosen)
            and (n.takes_trainings or not chosen.takes_trainings)
            and (
                n.full_nodes > chosen.full_nodes
                or n.fewest < chosen.fewest
                or (n.max_time_min or math.inf) > time
            )
        ]

    def of_several_nodes(self, chosen: Nodes) -> list[Nodes]:
        """Return other nodes that jobs can have more than one of, if these allow only one."""
        several = [n for n in self.partitions if n.full_nodes > 1 and not n.unusable]
        several = [n for n in several if not n.hidden]
        return several if chosen.nodes == 1 and not self.others_than(chosen) else []

    def best(self, partition: str | None = None) -> Nodes | None:
        """Return the nodes most suitable for training, in a partition or in all, or None.

        Hidden partitions come last, and so do other makers' GPUs among the accelerators. The order
        prefers the most accelerators for a job on up to two nodes, then time for more than a test,
        then more than one node (in this partition or in others with the same nodes), then jobs that
        are not preempted, then the site's default partition, then more nodes, then more time.
        """
        return _best([n for n in self.partitions if partition in (None, n.name, n.label)])


def _instead(other: Nodes, chosen: Nodes) -> bool:
    """Check whether another partition has the same nodes for jobs with the same options."""
    asks = any(not question.startswith("default_time_min|") for question in other.questions)
    usable = not (other.unusable or other.preempts or other.hidden or asks)
    same = all(getattr(other, key) == getattr(chosen, key) for key in _SAME)
    return other.name != chosen.name and usable and same


def _best(among: Sequence[Nodes]) -> Nodes | None:
    order = []
    for n in among:
        several = any(
            other.full_nodes > 1 and (other is n or _instead(other, n)) for other in among
        )
        each = 0.25 if n.sliced else n.accelerators
        order.append(
            (
                not n.unusable,
                not n.hidden,
                not any(question.startswith("account|") for question in n.questions),
                n.up > 0,
                each > 0 and not is_of_other_maker(n.gpu_type or ""),
                each * (2 if several else 1),
                n.takes_trainings,
                several,
                not n.preempts,
                n.default,
                n.full_nodes * (1 if n.accelerators else n.cpus),
                n.max_time_min or math.inf,
            )
        )
    return among[order.index(max(order))] if order else None


def detect(seen: Snapshot, types: Mapping[str, InstanceType]) -> DetectedCluster:
    """Return the partitions and nodes that the controller shows to this user."""
    config, access = seen.config, read_access(seen)
    found = [
        kind
        for fields in seen.partitions
        for kind in _Partition(fields, seen.nodes, config, types).kinds(access, seen.groups)
    ]
    if not found:
        raise SlurmError("scontrol shows you no partitions with nodes")
    if all(n.unusable for n in found):
        why = "; ".join(dict.fromkeys(f"{n.name}: {n.unusable}" for n in found))
        raise SlurmError(f"no partition here accepts your jobs: {why}")
    return DetectedCluster(
        cluster=config.get("ClusterName", "cluster"),
        accounting="slurmdbd" in config.get("AccountingStorageType", ""),
        # SchedMD's own tests set the first, AWS PCS the second.
        expedites=any(
            "enable_expedited_requeue" in config.get(key, "")
            for key in ("SlurmctldParameters", "SchedulerParameters")
        ),
        partitions=tuple(found),
    )


def find_partition(slurm: Slurm, name: str, types: Mapping[str, InstanceType]) -> Nodes:
    """Return a partition's nodes most suitable for training, no matter who may use it."""
    fields = slurm.show("partition", name)[0]
    kinds = _Partition(fields, slurm.show("node"), {}, types).kinds(Access(), None)
    if found := _best(kinds):
        return found
    raise SlurmError(f"scontrol shows you no nodes of partition {name}")


def gpus_of(gres: str) -> list[Gpus]:
    """Return a node's GPUs by type, from scontrol's `Gres=gpu:a100:8(S:0-1),mps:800`."""
    found: dict[str, int] = {}
    for word in re.split(r",(?![^(]*\))", gres):
        name, *words = re.sub(r"\(.*", "", word).split(":")
        if name != "gpu":
            continue
        number = int(words.pop()) if words and words[-1].isdecimal() else 1
        kind = ":".join(word for word in words if word != "no_consume")
        found[kind] = found.get(kind, 0) + number
    return [
        Gpus(number=n, kind=kind, sliced=bool(_SLICE.search(kind))) for kind, n in found.items()
    ]


def _usable_gpus(gres: str) -> Gpus:
    """Return the GPUs that one job can use together: full GPUs of the most frequent type."""
    every = gpus_of(gres)
    whole = [gpus for gpus in every if not gpus.sliced]
    if whole:
        return max(whole, key=lambda gpus: gpus.number)
    return replace(every[0], number=1) if every else Gpus()


class _Partition:
    """One partition's limits and nodes."""

    def __init__(
        self,
        fields: Mapping[str, str],
        nodes: Sequence[Mapping[str, str]],
        config: Mapping[str, str],
        types: Mapping[str, InstanceType],
    ) -> None:
        self._fields, self._config, self._types = fields, config, types
        self._name = fields["PartitionName"]
        self._nodes = [n for n in nodes if self._name in n.get("Partitions", "").split(",")]
        self._hidden = not self._nodes
        if self._hidden:  # powered down, and PrivateData does not include `cloud`
            self._nodes = _from_totals(fields)

    def kinds(self, access: Access, groups: Sequence[str] | None) -> list[Nodes]:
        """Return the kinds of nodes in the partition."""
        alike: dict[tuple[object, ...], list[Mapping[str, str]]] = {}
        for node in self._nodes:
            gpus = _usable_gpus(node.get("Gres", ""))
            key = (gpus, self._type_of(node)[0], 0 if gpus.number else self._cpus(node))
            alike.setdefault(key, []).append(node)
        return [self._kind(nodes, len(alike), access, groups) for nodes in alike.values()]

    def _kind(
        self,
        nodes: Sequence[Mapping[str, str]],
        kinds: int,
        access: Access,
        groups: Sequence[str] | None,
    ) -> Nodes:
        sources: dict[str, str] = {}
        gpus = _usable_gpus(nodes[0].get("Gres", ""))
        total_cpus = min(effective_cpus(node) for node in nodes)
        cpus = min(self._cpus(node) for node in nodes)
        memory = min(memory_of(node) for node in nodes)
        unset = any(int(node.get("RealMemory", "1")) <= 1 for node in nodes)
        granted = grant(
            access,
            self._fields,
            Limits(nodes=1, cpus=cpus, gpus=gpus.number, memory_mib=None if unset else memory),
        )
        limits = granted.limits
        if granted.qos:
            sources["qos"] = granted.why_qos
        sources["cpus_per_task"] = f"CPUEfctv of its nodes{_unlike(map(effective_cpus, nodes))}"
        if cpus < total_cpus:
            sources["cpus_per_task"] = f"MaxCPUsPerNode of the partition; a node has {total_cpus}"
        if limits.cpus is not None and limits.cpus < cpus:
            cpus = limits.cpus
            sources["cpus_per_task"] = f"{granted.limited_by} allows no more"
        number = gpus.number
        if limits.gpus is not None and 0 < limits.gpus < number:
            number = limits.gpus
            sources["gpus_per_node"] = f"{granted.limited_by} allows no more"
        exclusive = cpus == total_cpus and number == gpus.number and not gpus.sliced
        if not exclusive:
            sources["exclusive"] = "a job cannot use a whole node"
        slices = sum(each.number for each in gpus_of(nodes[0].get("Gres", "")) if each.sliced)
        if slices and exclusive:
            # Its steps see what SLURM_GPUS_PER_NODE names (seen on 22.05 and 24.11).
            sources["gpu_type"] = f"Gres of its nodes; --exclusive also takes their {slices} slices"
        if is_of_other_maker(gpus.kind):
            sources["gpu_type"] = (
                "Gres of its nodes; jobs look for NVIDIA GPUs, but another vendor made these"
            )
        total = len(nodes)
        up = sum(node_state(node.get("State", "")) not in UNUSABLE for node in nodes)
        constraint = self._constraint(nodes) if kinds > 1 else None
        default_time, time_source = self._default_time(limits)
        sources["default_time_min"] = time_source
        mem, sources["mem_per_node_mib"] = self._mem(nodes, cpus, exclusive, limits)
        sources["mem_per_node_mib"] += _unlike(map(memory_of, nodes))
        if unset and mem is not None:
            mem, sources["mem_per_node_mib"] = (
                0,
                ("0 means all memory, because slurm.conf does not set RealMemory for these nodes"),
            )
        most, sources["max_nodes"] = self._most_nodes(up, total, limits, granted)
        # On whole nodes, a job has every CPU.
        job_cpus = _below(limits.cpus, total_cpus * most if exclusive else cpus * most)
        job_gpus = _below(limits.gpus, number * most)
        for key, limit in (("job_cpus", job_cpus), ("job_gpus", job_gpus)):
            if limit:
                sources[key] = f"{granted.limited_by} allows no more"
        max_time = _least(minutes(self._fields.get("MaxTime", "")), limits.minutes)
        questions = [*granted.questions]
        if default_time is None:
            questions.append("default_time_min|the partition has no DefaultTime and no MaxTime")
        if self._fields.get("AllocNodes", "ALL") != "ALL":
            questions.append(f"partition|it accepts jobs only from {self._fields['AllocNodes']}")
        shares = self._fields.get("OverSubscribe", "")
        if shares.startswith("FORCE"):
            questions.append(f"exclusive|OverSubscribe={shares}: jobs always share its nodes")
        instance, sources["instance_type"] = self._type_of(nodes[0])
        tells = instance or (f"{gpus.kind}:{number}" if gpus.kind else constraint)
        tells = tells or (f"{number}-gpus" if number else f"{cpus}-cpus")
        return Nodes(
            name=self._name,
            label=f"{self._name}/{tells}" if kinds > 1 else self._name,
            default=self._fields.get("Default") == "YES",
            hidden=self._fields.get("Hidden") == "YES",
            nodes=most,
            job_cpus=job_cpus,
            job_gpus=job_gpus,
            fewest=max(granted.fewest_nodes, whole_number(self._fields.get("MinNodes")) or 1),
            preempts=self._preempts(),
            up=up,
            total=total,
            cpus=cpus,
            accelerators=number or (self._types[instance].accelerators if instance else 0),
            gpus=number,
            gpu_type=gpus.kind if number and gpus.kind else None,
            sliced=gpus.sliced,
            memory_mib=0 if unset else min(memory, mem or memory),
            mem_per_node_mib=mem,
            exclusive=exclusive,
            max_time_min=max_time,
            default_time_min=default_time,
            instance_type=instance,
            doubt="" if instance else self._doubt(nodes[0], gpus, most),
            without_efa=_parallelcluster(nodes[0]) and "efa" not in features_of(nodes[0]),
            node=next((n for n in nodes if n.get("State") == "IDLE"), nodes[0])["NodeName"],
            constraint=constraint,
            mixed=0 if constraint else self._also_fit(nodes, gpus, cpus),
            account=granted.account,
            qos=granted.qos,
            sources=sources,
            questions=tuple(questions),
            unusable=granted.refused or self._refusal(groups),
        )

    def _cpus(self, node: Mapping[str, str]) -> int:
        """Return the CPUs that a job can have on a node."""
        most = [effective_cpus(node)]
        if (limit := whole_number(self._fields.get("MaxCPUsPerNode"))) is not None:
            most.append(limit)
        if (each := whole_number(self._fields.get("MaxCPUsPerSocket"))) is not None:
            most.append(each * int(node.get("Sockets", 1)))
        return min(most)

    def _type_of(self, node: Mapping[str, str]) -> tuple[str | None, str]:
        """Return a node's instance type, and where it comes from."""
        words = _words_of(node)
        for source, names in words.items():
            found = {t: name for name in names if (t := self._known(name))}
            # These describe the node itself; the others may describe different nodes.
            own = source in _OF_THE_NODE
            fits = [t for t in found if own or self._fits(self._types[t], node)]
            if len(fits) == 1 or (fits and own):
                return fits[0], f"from the {source} {found[fits[0]]}"
        # Only on AWS, because other vendors' servers have the same sizes.
        by_size = self._of_size(node)
        if len(by_size) == 1 and _on_ec2(node, self._types[by_size[0]], words):
            return by_size[0], "from their CPUs, memory and GPUs, which no other type has"
        return None, ""

    def _known(self, name: str) -> str | None:
        """Return the catalog's type whose name is, or is contained in, a name."""
        named = name if name in self._types else ec2_name(name)
        known = self._types.get(named or "")
        return known.name if known and not known.device.on_host else None

    def _fits(self, known: InstanceType, node: Mapping[str, str]) -> bool:
        """Check whether a node can be of a type, even if slurm.conf omits its GPUs or CPUs."""
        gpus = sum(g.number for g in gpus_of(node.get("Gres", "")) if not g.sliced)
        cpus = int(node.get("CPUTot", 0))
        if gpus:
            return gpus == known.gpus and cpus <= known.vcpus
        return cpus in (known.vcpus, known.vcpus // 2, 1)

    def _of_size(self, node: Mapping[str, str]) -> list[str]:
        gpus = _usable_gpus(node.get("Gres", ""))
        if gpus.sliced:
            return []
        return types_of_size(
            self._types,
            cpus=int(node.get("CPUTot", 0)),
            memory_mib=int(node.get("RealMemory", 0)),
            gpus=gpus.number,
            gpu=gpus.kind,
        )

    def _doubt(self, node: Mapping[str, str], gpus: Gpus, most: int) -> str:
        """Return what is unknown about nodes whose instance type is unknown."""
        names = [name for names in _words_of(node).values() for name in names]
        named = [t for name in names if (t := ec2_name(name)) and t not in self._types]
        likely = self._of_size(node)
        if named:
            why = f"{named[0]} is not in the catalog"
        elif likely:
            why = f"judging by their size, they may be {' or '.join(likely)}"
        else:
            why = "Slurm does not name their instance type"
        if gpus.sliced or (gpus.number and most == 1):
            return ""
        if gpus.number:
            return f"{why}; it is unknown whether they have EFA."
        if self._hidden and "gpu" in self._config.get("GresTypes", ""):
            return "Slurm hides nodes that are off; it is unknown whether they have GPUs."
        if "gpu" not in self._config.get("GresTypes", "") and any(map(_NAMES_GPUS.search, names)):
            return (
                "a name mentions GPUs, but Slurm has no GRES; it is unknown whether they have GPUs."
            )
        # Neuron devices are not a GRES, and some sites have no GRES for GPUs.
        if any(map(is_accelerated, named)) or (likely and not named):
            return f"{why}; it is unknown whether they have accelerators."
        return ""

    def _constraint(self, nodes: Sequence[Mapping[str, str]]) -> str | None:
        """Return a feature that these nodes have and no other nodes in the partition have."""
        ours = {node["NodeName"] for node in nodes}
        others = {
            f for node in self._nodes if node["NodeName"] not in ours for f in features_of(node)
        }
        own = [
            f
            for f in features_of(nodes[0])
            if all(f in features_of(node) for node in nodes) and f not in others
        ]
        own.sort(key=lambda f: not self._known(f))
        return next(filter(_FEATURE.fullmatch, own), None)

    def _also_fit(self, nodes: Sequence[Mapping[str, str]], gpus: Gpus, cpus: int) -> int:
        """Return how many other nodes of the partition satisfy the same request."""
        ours = {node["NodeName"] for node in nodes}
        return sum(
            self._cpus(node) >= cpus
            and (
                not gpus.number
                or any(
                    other.number >= gpus.number and other.kind == gpus.kind
                    for other in gpus_of(node.get("Gres", ""))
                )
            )
            for node in self._nodes
            if node["NodeName"] not in ours
        )

    def _default_time(self, limits: Limits) -> tuple[int | None, str]:
        """Return the time limit that Slurm gives to a job without one, and its source."""
        default, limit = (minutes(self._fields.get(k, "")) for k in ("DefaultTime", "MaxTime"))
        source = "DefaultTime" if default else "MaxTime, because there is no DefaultTime"
        return _least(default or limit, limits.minutes), f"the partition's {source}"

    def _mem(
        self, nodes: Sequence[Mapping[str, str]], cpus: int, exclusive: bool, limits: Limits
    ) -> tuple[int | None, str]:
        """Return the memory to request, and why.

        --exclusive grants all CPUs, but no more memory than DefMemPerNode or DefMemPerCPU.
        """
        fields, config = self._fields, self._config
        memory = min(memory_of(node) for node in nodes)
        most = {}
        for per, factor in (("Node", 1), ("CPU", cpus)):
            key = f"MaxMemPer{per}"
            # A partition without its own limit has the cluster's.
            each = whole_number(fields.get(key)) or whole_number(config.get(key))
            if each:
                most[key] = each * factor
        if limits.memory_mib is not None:
            most["its QOS"] = limits.memory_mib
        if not exclusive and not most:
            most["its share of the CPUs"] = memory * cpus // min(effective_cpus(n) for n in nodes)
        # With --mem=0, Slurm compares the limit with the memory of the partition's first node
        # (_mem_per_node_part in src/slurmctld/job_mgr.c); a number is right whichever that is.
        largest = max(memory_of(node) for node in self._nodes)
        limit, key = min(((number, key) for key, number in most.items()), default=(largest, ""))
        if limit < largest:
            return min(memory, limit), f"{key if limit < memory else 'RealMemory of its nodes'}"
        select = fields.get("SelectTypeParameters", "NONE")
        select = config.get("SelectTypeParameters", "") if select == "NONE" else select
        defaults = [
            f"{key}={number}"
            for source in (fields, config)
            for key in ("DefMemPerNode", "DefMemPerCPU")
            if (number := whole_number(source.get(key)))
        ]
        defaults += re.findall(r"DefMemPerGPU=\d+", fields.get("JobDefaults", ""))
        if defaults or "MEMORY" in select.upper():
            default = f"; Slurm's default is {defaults[0]}" if defaults else ""
            return memory, f"all of a node's memory{default}"
        return None, ""

    def _most_nodes(self, up: int, total: int, limits: Limits, granted: Grant) -> tuple[int, str]:
        """Return how many nodes a job can have, and which limit determines it."""
        now = "" if up == total else f"; {up} are up now"
        most = {}
        if (limit := whole_number(self._fields.get("MaxNodes"))) is not None:
            most[f"MaxNodes of the partition; it has {total} such nodes"] = limit
        most[f"the partition's identical nodes{now}"] = total
        if limits.nodes is not None:
            name = granted.limited_by
            most[f"{name} allows no more; the partition has {total} such nodes"] = limits.nodes
        source = min(most, key=lambda key: most[key])
        return max(1, most[source]), source

    def _preempts(self) -> bool:
        """Check whether jobs in partitions with a higher PriorityTier can take this one's nodes.

        PreemptMode=OFF exempts a partition (slurm.conf(5), PreemptMode).
        """
        by_partition = self._config.get("PreemptType") == "preempt/partition_prio"
        return by_partition and self._fields.get("PreemptMode", "OFF") != "OFF"

    def _refusal(self, groups: Sequence[str] | None) -> str:
        """Return why the partition does not accept this user's jobs; empty if it does."""
        fields = self._fields
        state = fields.get("State", "UP")
        allowed = fields.get("AllowGroups", "ALL")
        if state != "UP":
            return f"its State is {state}"
        if fields.get("RootOnly") == "YES" and groups is not None:
            return "RootOnly"
        if fields.get("ReqResv") == "YES":
            return "it needs a reservation"
        if allowed != "ALL" and groups is not None and not {*groups} & {*allowed.split(",")}:
            return f"it allows only groups {allowed}"
        if whole_number(fields.get("MaxNodes")) == 0:
            return "MaxNodes is 0"
        return ""


def _from_totals(fields: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return identical nodes, computed from the totals of a partition whose nodes are hidden."""
    number = whole_number(fields.get("TotalNodes")) or 0
    if not number or fields.get("Nodes") == "(null)":
        return []
    tres = dict(re.findall(r"([\w/]+)=(\w+)", fields.get("TRES", "")))
    cpus = int(fields.get("TotalCPUs", 0)) // number
    memory = (mebibytes(tres.get("mem", "")) or number) // number
    gpus = (whole_number(tres.get("gres/gpu")) or 0) // number
    one = {"CPUTot": str(cpus), "RealMemory": str(memory), "State": "IDLE+CLOUD+POWERED_DOWN"}
    name = fields["PartitionName"]
    gres = {"Gres": f"gpu:{gpus}"} if gpus else {}
    every = [f"{name}-hidden-{n}" for n in range(number)]
    return [{"NodeName": node, "Partitions": name, **one, **gres} for node in every]


def _unlike(numbers: Iterable[int]) -> str:
    """Return a note for the case that the nodes a job may get differ."""
    found = sorted({*numbers})
    return f", the lowest value: some have {found[-1]}" if len(found) > 1 else ""


def _words_of(node: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return names that may contain a node's instance type, by their source, the best first.

    SageMaker HyperPod has a partition `dev` with all nodes, and one for each type, such as
    ml.p5.48xlarge (aws-samples/awesome-distributed-training, 5.sagemaker-hyperpod/slurm-studio).
    """
    return {
        _HYPERPOD: [node.get("InstanceType", "")],
        "feature": features_of(node),
        "partition": node.get("Partitions", "").split(","),
        "node's name": [node["NodeName"]],
        "GRES": [gpus.kind for gpus in gpus_of(node.get("Gres", ""))],
    }


def _on_ec2(
    node: Mapping[str, str], known: InstanceType, words: Mapping[str, Sequence[str]]
) -> bool:
    """Check for a sign of EC2: a host name, a type name, or ParallelCluster's 95 % of memory."""
    schedulable = int(node.get("RealMemory", 0)) - known.host_gib * 1024 * 0.95
    return (
        bool(_EC2_HOST.match(node["NodeName"]))
        or abs(schedulable) <= 1
        or any(ec2_name(name) for names in words.values() for name in names)
    )


def _parallelcluster(node: Mapping[str, str]) -> bool:
    """Check whether a node's first feature and its name are ParallelCluster's."""
    first = next(iter(features_of(node)), "")
    mark = {"static": "-st-", "dynamic": "-dy-"}.get(first)
    return mark is not None and mark in node["NodeName"]


def effective_cpus(node: Mapping[str, str]) -> int:
    """Return a node's CPUs for jobs: since Slurm 22.05, CPUEfctv excludes the system's CPUs."""
    if known := whole_number(node.get("CPUEfctv")):
        return known
    reserved = int(node.get("CoreSpecCount", 0)) * int(node.get("ThreadsPerCore", 1))
    return int(node.get("CPUTot", 0)) - reserved


def memory_of(node: Mapping[str, str]) -> int:
    """Return a node's memory for jobs in MiB."""
    return int(node.get("RealMemory", 0)) - int(node.get("MemSpecLimit", 0))


def features_of(node: Mapping[str, str]) -> list[str]:
    """Return the features that jobs can request."""
    text = node.get("AvailableFeatures", "(null)")
    return [] if text == "(null)" else text.split(",")


def whole_number(text: str | None) -> int | None:
    """Return a number that Slurm prints, or None for UNLIMITED and the like."""
    return int(text) if text and text.isdecimal() else None


def _below(limit: int | None, wanted: int) -> int | None:
    """Return a limit if it is lower than what is wanted, or None."""
    return limit if limit and limit < wanted else None


def _least(*numbers: int | None) -> int | None:
    known = [n for n in numbers if n is not None]
    return min(known) if known else None
