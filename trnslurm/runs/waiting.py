"""Why a run is not running: what its job waits for, and the nodes that it could run on."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.runs.run import Record, RunDir
from trnslurm.runs.status import run_status
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.reasons import node_reason

_WAITING = ("PENDING", "HELD", "CONFIGURING", "REQUEUED")
_UNUSABLE = ("down", "drained")
# Flags of a node's state, the first that is there; then its base state.
_FLAGS = {
    "DRAIN": "drained",
    "FAIL": "down",
    "INVALID_REG": "down",
    "NOT_RESPONDING": "down",
    "POWERING_UP": "booting",
    "POWERING_DOWN": "powering down",
    "POWER_DOWN": "powering down",
    "MAINTENANCE": "reserved",
    "RESERVED": "reserved",
}
_STATES = {
    "DOWN": "down",
    "ERROR": "down",
    "FUTURE": "down",
    "DRAINED": "drained",
    "DRAINING": "drained",
    "ALLOCATED": "in use",
    "MIXED": "in use",
    "COMPLETING": "in use",
    "IDLE": "idle",
}
_PARTITION = {
    "UP": "",
    "INACTIVE": "inactive: on ParallelCluster its fleet is stopped, or protected after nodes that "
    "failed to boot; fix the cause, then pcluster update-compute-fleet --status START_REQUESTED",
    "DOWN": "down: jobs queue, none starts; an administrator sets it UP",
    "DRAIN": "draining: it takes no new jobs",
}


class SickNode(Frozen):
    """A node on which the job cannot run now."""

    name: str
    state: str
    reason: str


@dataclass(kw_only=True)
class Diagnosis:
    """What is known about a run that may wait."""

    run: str
    state: str
    reason: str
    phase: str = ""
    """The phase that waits, and its job."""
    job_id: str = ""
    start: str = ""
    """When Slurm expects it to start; empty if it does not say."""
    if_submitted_now: str = ""
    """What sbatch --test-only says about its script."""
    partition: str = ""
    nodes_needed: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    """How many nodes of the partition are in which state."""
    sick: list[SickNode] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Nodes that the run avoids, and why."""
    problems: list[str] = field(default_factory=list)
    """What will not pass by itself."""
    unknown: list[str] = field(default_factory=list)
    """What could not be asked, and why."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unknown


def diagnose(run: RunDir) -> Diagnosis:
    """Return what Slurm and the run's own files say about its waiting."""
    record, status = run.record(), run_status(run)
    found = Diagnosis(run=run.name, state=status.state, reason=status.reason)
    for host, (until, why) in run.left_out().items():
        text = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        found.left_out[host] = f"{why}, until {text}"
    if status.final and status.state != "COMPLETED":
        found.problems.append(f"it has ended: trnslurm status {run.name} shows why")
    # What follows the first unfinished phase waits for it.
    phase = next((phase for phase in status.phases if phase.state != "COMPLETED"), None)
    if phase is None or phase.state not in _WAITING:
        return found
    found.phase, found.job_id, found.nodes_needed = phase.phase, phase.job_id, record.nodes
    if phase.state == "HELD":
        found.problems.append(f"job {phase.job_id} is held: scontrol release {phase.job_id}")
    if record.scheduler == "slurm":
        _ask_slurm(found, run, record)
    return found


def _ask_slurm(found: Diagnosis, run: RunDir, record: Record) -> None:
    slurm = Slurm(record.bin_dir)
    try:
        job = slurm.show("job", found.job_id)[0]
        found.partition = job["Partition"]
        if re.match(r"\d{4}-", job["StartTime"]):
            found.start = job["StartTime"]
        _look_at_nodes(found, slurm)
        accepted, said = slurm.try_out(run.script(found.phase).absolute())
    except SlurmError as error:
        found.unknown.append(str(error))
        return
    if accepted:
        found.if_submitted_now = said
    else:
        found.problems.append(f"Slurm would not take its script now: {said}")


def _look_at_nodes(found: Diagnosis, slurm: Slurm) -> None:
    """Count the nodes of the job's partition by state, and name those that are out of use."""
    state = slurm.show("partition", found.partition)[0]["State"]
    if trouble := _PARTITION.get(state, state):
        found.problems.append(f"partition {found.partition} is {trouble}")
    nodes = [n for n in slurm.show("node") if found.partition in n["Partitions"].split(",")]
    states = {node["NodeName"]: node_state(node["State"]) for node in nodes}
    found.nodes = dict(Counter(states.values()))
    for node in nodes:
        if (word := states[node["NodeName"]]) in _UNUSABLE:
            # Without who said so, and when.
            reason = re.sub(r" \[\S+@\S+\]$", "", node.get("Reason", "").strip())
            reason = node_reason(reason) or "no reason given"
            found.sick.append(SickNode(name=node["NodeName"], state=word, reason=reason))
    usable = [n for n, s in states.items() if s not in _UNUSABLE and n not in found.left_out]
    if len(usable) < found.nodes_needed:
        found.problems.append(
            f"it needs {found.nodes_needed} nodes, and only {len(usable)} of the "
            f"{len(nodes)} of partition {found.partition} can run it"
        )


def node_state(state: str) -> str:
    """Return a node's state, such as `IDLE+CLOUD+POWERED_DOWN`, in a word or two."""
    base, *flags = re.sub(r"[*#~%$@!^-]", "", state).split("+")
    for flag, words in _FLAGS.items():
        if flag in flags:
            return words
    if base == "IDLE" and "POWERED_DOWN" in flags:
        return "off until a job needs it"
    return _STATES.get(base, base.lower())
