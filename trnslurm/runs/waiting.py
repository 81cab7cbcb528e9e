"""Why a run is not running: what its job waits for, and the state of the nodes it could run on."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trnslurm.errors import SlurmError
from trnslurm.runs.phase import PhaseStatus
from trnslurm.runs.run import Record, RunDir
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.reasons import node_reason

_WAITING = ("PENDING", "HELD", "CONFIGURING", "REQUEUED")
_UNUSABLE = ("down", "drained")
# Flags of a node's state, the first that is there; then its base state.
_FLAGS = {
    "DRAIN": "drained", "FAIL": "down", "INVALID_REG": "down", "NOT_RESPONDING": "down",
    "POWERING_UP": "booting", "POWERING_DOWN": "powering down", "POWER_DOWN": "powering down",
    "MAINTENANCE": "reserved", "RESERVED": "reserved",
}  # fmt: skip
_STATES = {
    "DOWN": "down", "ERROR": "down", "FUTURE": "down", "DRAINED": "drained",
    "DRAINING": "drained", "ALLOCATED": "in use", "MIXED": "in use", "COMPLETING": "in use",
    "IDLE": "idle",
}  # fmt: skip
_PARTITION = {
    "UP": "",
    "INACTIVE": "inactive: on ParallelCluster its fleet is stopped, or protected after nodes that "
    "failed to boot; mend the cause, then pcluster update-compute-fleet --status START_REQUESTED",
    "DOWN": "down: jobs queue, none starts; an administrator sets it UP",
    "DRAIN": "draining: it takes no new jobs",
}


@dataclass(frozen=True, kw_only=True)
class SickNode:
    """A node on which the job cannot run now."""

    name: str
    state: str
    reason: str


@dataclass(kw_only=True)
class Diagnosis:
    """What is known of a run that may wait."""

    run: str
    state: str
    reason: str
    phase: str = ""
    """The phase that waits, and its job."""
    job_id: str = ""
    start: str = ""
    """When Slurm expects it to start; empty: it does not say."""
    if_submitted_now: str = ""
    """What sbatch --test-only says of its script."""
    partition: str = ""
    nodes_needed: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    """How many nodes of the partition are in which state."""
    sick: Sequence[SickNode] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Nodes that the run avoids, and why."""
    problems: list[str] = field(default_factory=list)
    """What does not pass by itself."""
    unknown: list[str] = field(default_factory=list)
    """What could not be asked, and why."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unknown


def diagnose(run: RunDir) -> Diagnosis:
    """Ask Slurm, and the run's own files."""
    record, status = run.record(), run_status(run)
    found = Diagnosis(run=run.name, state=status.state, reason=status.reason)
    found.left_out = _left_out(run)
    if status.final and status.state != "COMPLETED":
        found.problems.append(f"it has ended: trnslurm status {run.name} shows why")
    phase = _waiting(status)
    if phase is None:
        return found
    found.phase, found.job_id, found.nodes_needed = phase.phase, phase.job_id, record.nodes
    if phase.state == "HELD":
        found.problems.append(f"job {phase.job_id} is held: scontrol release {phase.job_id}")
    if record.scheduler == "slurm":
        _ask_slurm(found, run, record)
    return found


def _waiting(status: RunStatus) -> PhaseStatus | None:
    """Return the first phase that has not begun; what follows waits for it."""
    unfinished = [phase for phase in status.phases if phase.state != "COMPLETED"]
    return next((phase for phase in unfinished[:1] if phase.state in _WAITING), None)


def _ask_slurm(found: Diagnosis, run: RunDir, record: Record) -> None:
    slurm = Slurm(record.bin_dir)
    try:
        job = slurm.show("job", found.job_id)[0]
        found.partition, found.start = job["Partition"], _time(job["StartTime"])
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
    found.sick = [
        SickNode(name=node["NodeName"], state=state, reason=_reason(node))
        for node in nodes
        if (state := states[node["NodeName"]]) in _UNUSABLE
    ]
    usable = [n for n, s in states.items() if s not in _UNUSABLE and n not in found.left_out]
    if len(usable) < found.nodes_needed:
        found.problems.append(
            f"it needs {found.nodes_needed} nodes, and only {len(usable)} of the "
            f"{len(nodes)} of partition {found.partition} can run it"
        )


def node_state(state: str) -> str:
    """Say a node's state, as in `IDLE+CLOUD+POWERED_DOWN`, in a word or two."""
    base, *flags = re.sub(r"[*#~%$@!^-]", "", state).split("+")
    for flag, words in _FLAGS.items():
        if flag in flags:
            return words
    if base == "IDLE" and "POWERED_DOWN" in flags:
        return "off until a job needs it"
    return _STATES.get(base, base.lower())


def _reason(node: Mapping[str, str]) -> str:
    """Why a node is out of use: without who said so, and when."""
    reason = re.sub(r" \[\S+@\S+\]$", "", node.get("Reason", "").strip())
    return node_reason(reason) or "no reason given"


def _time(text: str) -> str:
    return text if re.match(r"\d{4}-", text) else ""


def _left_out(run: RunDir) -> dict[str, str]:
    """Return the nodes that the run's next attempts avoid."""
    try:
        nodes = json.loads(run.excluded_file.read_text(encoding="utf-8"))["nodes"]
        now = time.time()
        return {
            str(host): f"{entry['why']}, until {_clock(float(entry['until']))}"
            for host, entry in nodes.items()
            if float(entry["until"]) > now
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
