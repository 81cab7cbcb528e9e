"""Asks Slurm whether it would ever start the jobs of a submission, before any is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trnslurm.console import Console
from trnslurm.errors import SlurmError, SubmitError
from trnslurm.schedulers.interface import BatchScript
from trnslurm.schedulers.slurm.asked import NO_SUCH_NODE, QUEUE_FULL, SUBMIT_LIMIT, Asked, nodes_of
from trnslurm.slurm.access import Access, Limits, limits_of, minutes, read_access
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.detect import effective_cpus, features_of, gpus_of, memory_of, whole_number
from trnslurm.slurm.reasons import node_state
from trnslurm.slurm.snapshot import Snapshot

# Slurm tries a job on these nodes, but not, for example, on nodes that have not registered since
# the controller was restarted (UNKNOWN).
_ACCOUNTING_S = 10.0  # without an answer, the job is submitted
# The limits of a job in words, and the options that set what it has.
_LIMITED = {
    "nodes": ("nodes", ["nodes"]),
    "cpus": ("CPUs", ["nodes", "cpus-per-task"]),
    "gpus": ("GPUs", ["nodes", "gpus-per-node"]),
    "minutes": ("minutes", []),
}
_AVAILABLE = ("idle", "in use", "off until a job needs it")


class Over(NamedTuple):
    """What a script requests and a partition does not allow."""

    text: str
    certain: bool
    """Whether the job is certain to wait forever."""


def try_out(scripts: Sequence[BatchScript], slurm: Slurm, console: Console, tasks: int) -> None:
    """Refuse scripts that Slurm would reject or leave pending forever.

    `sbatch --test-only` checks neither a partition's State, nor its MaxTime, nor its MaxMemPerNode
    (seen on Slurm 22.05; job_start_data in src/slurmctld/job_scheduler.c). It rejects a job whose
    nodes are only down, so these nodes are counted here. Other errors are left to the submission
    itself. The scripts of a sweep are tried as an array with as many `tasks`, because --test-only
    does check how many jobs the user may have.
    """
    tried = [Asked(**vars(script)) for script in scripts]
    for asked in tried:
        _refuse_unknown(asked.components[1:], slurm)
        _try(asked, slurm, console, tasks)
    tried = [component for asked in tried for component in asked.components]
    try:
        every = slurm.show("partition")
        for asked in tried:
            own = asked.partitions(every)
            for partition in own:
                name, state = partition["PartitionName"], partition.get("State", "UP")
                if state != "UP":
                    until = "jobs wait until an administrator sets it UP"
                    console.warn(f"partition {name} is {state}: {until}")
            _tell([_over_partition(asked, each, slurm) for each in own], console)
        access = read_access(Snapshot.of_accounts(slurm, timeout_s=_ACCOUNTING_S))
        for asked in tried:
            own = asked.partitions(every)
            _tell([_over_account(asked, each, access, slurm) for each in own], console)
    except SlurmError:  # the submission says it
        return


def _refuse_unknown(components: Sequence[Asked], slurm: Slurm) -> None:
    """Refuse roles in a partition that does not exist; sbatch would not say which one is meant."""
    try:
        there = [p["PartitionName"] for p in slurm.show("partition")] if components else []
    except SlurmError:  # the submission says it
        return
    for asked in components:
        if not {*asked.value("partition").split(",")} & {*there}:
            what = asked.keys(["partition"])
            raise SubmitError(f"{what}: the partitions of the cluster are {', '.join(there)}")


def _tell(answers: Sequence[Over | None], console: Console) -> None:
    """Refuse or warn if each of a script's partitions offers too little."""
    found = [answer for answer in answers if answer]
    if not found or len(found) < len(answers):
        return
    if all(each.certain for each in found):
        raise SubmitError(f"the job would wait forever: {found[0].text}")
    console.warn(f"the job may wait forever: {found[0].text}")


def _try(asked: Asked, slurm: Slurm, console: Console, tasks: int) -> None:
    try:
        accepted, answer = slurm.try_out(asked.script, tasks)
    except SlurmError:  # the submission says it, and cleans up
        return
    if accepted or not asked.is_refusal(answer):
        return
    short = asked.components if NO_SUCH_NODE in answer.lower() else []
    waits = next(filter(None, (_waits_for_nodes(part, slurm) for part in short)), "")
    if not waits:
        too_many = any(part in answer.lower() for part in (SUBMIT_LIMIT, *QUEUE_FULL))
        many = f"{tasks} jobs of a sweep: " if tasks > 1 and too_many else ""
        meant = _part_refused(asked, slurm)
        raise SubmitError(meant.explain(f"{many}sbatch: {answer}", slurm))
    console.warn(waits)


def _part_refused(asked: Asked, slurm: Slurm) -> Asked:
    """Return the component of a heterogeneous job that Slurm rejects on its own, or the job."""
    parts = asked.components
    alone = parts if len(parts) > 1 else []
    return next((part for part in alone if not slurm.try_out(part.script)[0]), asked)


def _over_partition(asked: Asked, partition: Mapping[str, str], slurm: Slurm) -> Over | None:
    """Return what a partition does not allow, in cases in which Slurm queues the job anyway."""
    name, memory = partition["PartitionName"], whole_number(asked.value("mem"))
    time, most = minutes(_full(asked.value("time"))), minutes(partition.get("MaxTime", ""))
    limit = whole_number(partition.get("MaxMemPerNode"))
    if memory == 0:  # all of a node: Slurm takes the partition's first (job_mgr.c)
        memory = next(map(memory_of, nodes_of([name], slurm)), None)
    over = {
        "time": bool(time and most and time > most) and f"MaxTime={partition['MaxTime']}",
        "mem": bool(memory and limit and memory > limit) and f"MaxMemPerNode={limit}",
    }
    for option, key in (("account", "AllowAccounts"), ("qos", "AllowQos")):
        allowed, given = partition.get(key, "ALL"), asked.value(option)
        taken = not given or {given, "ALL"} & {*allowed.split(",")}
        over[option] = not taken and f"{key}={allowed}"
    # A QOS may lift the partition's limit; newer Slurm also takes the accounts below those.
    unsure = ("account", "time") if asked.value("qos") else ("account",)
    found = [
        Over(f"partition {name} has {allows}, but {asked.keys([option])}", option not in unsure)
        for option, allows in over.items()
        if allows
    ]
    return next((each for each in found if each.certain), found[0] if found else None)


def _over_account(
    asked: Asked, partition: Mapping[str, str], access: Access, slurm: Slurm
) -> Over | None:
    """Return what the account and QOS do not allow in a partition.

    Slurm queues the job with a reason such as AssocMaxCpuPerJobLimit (seen on 22.05), unless its
    QOS has the flag DenyOnLimit.
    """
    limits, by = limits_of(access, partition, asked.value("account"), asked.value("qos"))
    if limits == Limits():
        return None
    nodes = whole_number(asked.value("nodes").partition("-")[0]) or 1
    tasks, each = (whole_number(asked.value(o)) or 1 for o in ("ntasks-per-node", "cpus-per-task"))
    gpus = whole_number(asked.value("gpus-per-node").rpartition(":")[2])
    cpus = tasks * each
    if asked.has("exclusive"):
        there = [n for n in nodes_of([partition["PartitionName"]], slurm) if _fits(asked, n)]
        cpus = min(map(effective_cpus, there), default=cpus)
    need = Limits(
        nodes=nodes,
        cpus=nodes * cpus,
        gpus=nodes * gpus if gpus else None,
        minutes=minutes(_full(asked.value("time"))),
    )
    over = limits.below(need)
    if not over:
        return None
    name, most = next(iter(over.items()))
    what, options = _LIMITED[name]
    text = f"a job can have at most {most} {what} ({by}), but this one needs {getattr(need, name)}"
    if name == "cpus" and nodes * tasks * each <= most:
        text += ", because --exclusive takes whole nodes"
    way = asked.keys(options) or f"set slurm.max_time_min to {most}"
    # With the flag OverPartQOS, the job's QOS takes precedence over that of its partition.
    return Over(f"{text}; {way}", certain=partition.get("QoS", "N/A") in ("N/A", ""))


def _waits_for_nodes(asked: Asked, slurm: Slurm) -> str:
    """Return how many suitable nodes are up, if enough exist but too few of them are up now."""
    try:
        partitions = asked.partitions(slurm.show("partition"))
        nodes = nodes_of([p["PartitionName"] for p in partitions], slurm)
    except SlurmError:
        return ""
    fit = [node for node in nodes if _fits(asked, node)]
    up = [node for node in fit if node_state(node.get("State", "")) in _AVAILABLE]
    least = whole_number(asked.value("nodes").partition("-")[0]) or 1
    most = max((whole_number(p.get("MaxNodes")) or len(fit) for p in partitions), default=0)
    if not len(up) < least <= min(len(fit), most):
        return ""
    return (
        f"only {len(up)} of the {len(fit)} nodes that fit the job are up, but it needs {least}: "
        "it waits until more are up"
    )


def _fits(asked: Asked, node: Mapping[str, str]) -> bool:
    """Check whether a node has what a script requests; return False if that is unclear."""
    tasks, cpus = (whole_number(asked.value(o)) or 1 for o in ("ntasks-per-node", "cpus-per-task"))
    kind, _, gpus = f":{asked.value('gpus-per-node')}".rpartition(":")
    kind, memory = kind.strip(":"), whole_number(asked.value("mem")) or 0
    there = [g.number for g in gpus_of(node.get("Gres", "")) if kind in ("", g.kind)]
    return (
        tasks * cpus <= effective_cpus(node)
        and (not gpus or int(gpus) <= sum(there))
        and memory <= memory_of(node)
        and set(filter(None, asked.value("constraint").split("&"))) <= {*features_of(node)}
    )


def _full(time: str) -> str:
    """Return our D-HH:MM:00 or HH:MM:00 as scontrol prints it."""
    return time if time.count(":") == 2 else f"{time}:00"
