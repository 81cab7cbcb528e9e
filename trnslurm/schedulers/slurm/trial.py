"""Asks Slurm whether it would ever start the jobs of a submission, before any is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trnslurm.console import Console
from trnslurm.errors import SlurmError, SubmitError
from trnslurm.schedulers.interface import BatchScript
from trnslurm.schedulers.slurm.asked import NO_SUCH_NODE, QUEUE_FULL, SUBMIT_LIMIT, Asked, nodes_of
from trnslurm.slurm.access import Access, Limits, limits_of, minutes, read_access
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.detect import effective_cpus, features_of, gpus_of, memory_of, whole_number
from trnslurm.slurm.reasons import node_state
from trnslurm.slurm.snapshot import Snapshot

# Slurm tries a job on these nodes; not, for example, on those that have not registered again since
# the controller restarted (UNKNOWN).
_ACCOUNTING_S = 10.0  # without an answer, the job is submitted
# The limits of a job in words, and the options that set what it has.
_LIMITED = {
    "nodes": ("nodes", ["nodes"]),
    "cpus": ("CPUs", ["nodes", "cpus-per-task"]),
    "gpus": ("GPUs", ["nodes", "gpus-per-node"]),
    "minutes": ("minutes", []),
}
_AVAILABLE = ("idle", "in use", "off until a job needs it")


def try_out(scripts: Sequence[BatchScript], slurm: Slurm, console: Console, tasks: int) -> None:
    """Refuse scripts that Slurm would refuse, or leave pending for good.

    `sbatch --test-only` sees neither a partition's State, nor its MaxTime, nor its MaxMemPerNode
    (seen on Slurm 22.05; job_start_data in src/slurmctld/job_scheduler.c). It refuses a job whose
    nodes are merely down: those are counted here. An error that it gives for other reasons is left
    to the submission itself. The scripts of a sweep are tried as an array of so many `tasks`,
    because it does see how many jobs the user may have.
    """
    tried = [Asked(**vars(script)) for script in scripts]
    for asked in tried:
        _try(asked, slurm, console, tasks)
    try:
        partitions = slurm.show("partition")
        for asked in tried:
            all_memory = asked.value("mem") == "0"
            for partition in asked.partitions(partitions):
                nodes = nodes_of([partition["PartitionName"]], slurm) if all_memory else []
                _compare(asked, partition, nodes, console)
        access = read_access(Snapshot.of_accounts(slurm, timeout_s=_ACCOUNTING_S))
        for asked in tried if access.associations else ():
            _compare_limits(asked, partitions, access, slurm, console)
    except SlurmError:  # the submission says it
        return


def _try(asked: Asked, slurm: Slurm, console: Console, tasks: int) -> None:
    try:
        accepted, answer = slurm.try_out(asked.script, tasks)
    except SlurmError:  # the submission says it, and cleans up
        return
    if accepted or not asked.is_refusal(answer):
        return
    waits = _waits_for_nodes(asked, slurm) if NO_SUCH_NODE in answer.lower() else ""
    if not waits:
        too_many = any(part in answer.lower() for part in (SUBMIT_LIMIT, *QUEUE_FULL))
        many = f"{tasks} jobs of a sweep: " if tasks > 1 and too_many else ""
        raise SubmitError(asked.explain(f"{many}sbatch: {answer}", slurm))
    console.warn(waits)


def _compare(
    asked: Asked,
    partition: Mapping[str, str],
    nodes: Sequence[Mapping[str, str]],
    console: Console,
) -> None:
    """Refuse what the partition's limits leave pending for good, where Slurm queues it."""
    name = partition["PartitionName"]
    state = partition.get("State", "UP")
    if state != "UP":
        console.warn(f"partition {name} is {state}: jobs wait until an administrator sets it UP")
    time, most = minutes(_full(asked.value("time"))), minutes(partition.get("MaxTime", ""))
    memory, limit = whole_number(asked.value("mem")), whole_number(partition.get("MaxMemPerNode"))
    if memory == 0 and nodes:  # all of a node: Slurm takes the partition's first (job_mgr.c)
        memory = memory_of(nodes[0])
    over = {
        "time": bool(time and most and time > most) and f"MaxTime={partition['MaxTime']}",
        "mem": bool(memory and limit and memory > limit) and f"MaxMemPerNode={limit}",
    }
    for option, key in (("account", "AllowAccounts"), ("qos", "AllowQos")):
        allowed, given = partition.get(key, "ALL"), asked.value(option)
        taken = not given or {given, "ALL"} & {*allowed.split(",")}
        over[option] = not taken and f"{key}={allowed}"
    for option, allows in over.items():
        if not allows:
            continue
        keys = asked.keys([option])
        # A QOS may lift the partition's limit; newer Slurm also takes the accounts below those.
        if option == "account" or (option == "time" and asked.value("qos")):
            console.warn(f"partition {name} has {allows}, and {keys}: the job may wait for good")
        else:
            raise SubmitError(
                f"partition {name} has {allows}, so the job would wait for good; {keys}"
            )


def _compare_limits(
    asked: Asked,
    partitions: Sequence[Mapping[str, str]],
    access: Access,
    slurm: Slurm,
    console: Console,
) -> None:
    """Refuse what the limits of the account and QOS leave pending for good, in every partition.

    Slurm queues it, with a reason such as AssocMaxCpuPerJobLimit (seen on 22.05), unless its QOS
    has the flag DenyOnLimit.
    """
    nodes = whole_number(asked.value("nodes").partition("-")[0]) or 1
    tasks, each = (whole_number(asked.value(o)) or 1 for o in ("ntasks-per-node", "cpus-per-task"))
    gpus = whole_number(asked.value("gpus-per-node").rpartition(":")[2])
    own = asked.partitions(partitions)
    if asked.has("exclusive") and own:
        every = nodes_of([p["PartitionName"] for p in own], slurm)
        cpus = min((effective_cpus(n) for n in every if _fits(asked, n)), default=tasks * each)
    else:
        cpus = tasks * each
    need = Limits(
        nodes=nodes,
        cpus=nodes * cpus,
        gpus=nodes * gpus if gpus else None,
        minutes=minutes(_full(asked.value("time"))),
    )
    said: list[str] = []
    for partition in own:
        limits, by = limits_of(access, partition, asked.value("account"), asked.value("qos"))
        over = limits.below(need)
        if not over:
            return
        name, most = next(iter(over.items()))
        what, options = _LIMITED[name]
        allows = f"by {by} a job has at most {most} {what}, and this one {getattr(need, name)}"
        if name == "cpus" and nodes * tasks * each <= most:
            allows += ", as --exclusive takes nodes whole"
        way = asked.keys(options) or f"set slurm.max_time_min to {most}"
        said.append(f"{allows}; {way}")
    # With the flag OverPartQOS, the job's QOS comes before that of its partition.
    if said and all(p.get("QoS", "N/A") in ("N/A", "") for p in own):
        raise SubmitError(f"the job would wait for good: {said[0]}")
    if said:
        console.warn(f"the job may wait for good: {said[0]}")


def _waits_for_nodes(asked: Asked, slurm: Slurm) -> str:
    """Return how many fitting nodes are up, if enough fit the job but too few are up now."""
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
        f"{len(up)} of the {len(fit)} nodes that fit the job are up now, and it needs {least}: it "
        "waits until more are up"
    )


def _fits(asked: Asked, node: Mapping[str, str]) -> bool:
    """Check whether a node has what a script asks for; False if that is not clear."""
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
