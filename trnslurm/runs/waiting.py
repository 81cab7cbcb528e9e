"""Diagnoses why a run is not running: what its job waits for, and which nodes are usable."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trnslurm.contract.states import State
from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import Record, RunDir
from trnslurm.rundir import read_file
from trnslurm.runs.status import run_status
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.reasons import UNUSABLE, node_reason, node_state

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
    """A run that may be waiting, and the reasons."""

    run: str
    state: str
    reason: str
    phase: str = ""
    """The phase that waits."""
    job_id: str = ""
    start: str = ""
    """The start that Slurm expects; empty if unknown."""
    if_submitted_now: str = ""
    """The answer of sbatch --test-only for the phase's script."""
    partition: str = ""
    nodes_needed: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    """State -> the number of the partition's nodes in that state."""
    sick: list[SickNode] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Nodes that the run excludes, and why."""
    lacks_nodes: bool = False
    """Whether fewer nodes are usable than the job needs."""
    problems: list[str] = field(default_factory=list)
    """Problems that need an action."""
    unknown: list[str] = field(default_factory=list)
    """Errors of Slurm's commands, which left questions open."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unknown


_NO_NODE = ": it waits until an admin puts one back, or you submit it to another partition"


def diagnose(run: RunDir) -> Diagnosis:
    """Return what Slurm and the run's files say about why the run waits."""
    record, status = run.record(), run_status(run)
    found = Diagnosis(run=run.name, state=status.state, reason=status.reason)
    for host, (until, why) in run.excluded().items():
        text = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        found.left_out[host] = f"{why}, until {text}"
    if status.final and status.state is not State.COMPLETED:
        found.problems.append(f"it has ended: trnslurm status {run.name} shows why")
    # Later phases wait for the first unfinished phase.
    phase = next((phase for phase in status.phases if phase.state is not State.COMPLETED), None)
    if phase is None or not (phase.state.waiting or phase.state is State.REQUEUED):
        return found
    found.phase, found.job_id, found.nodes_needed = phase.phase, phase.job_id, record.nodes
    if phase.state is State.HELD:
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
        accepted, answer = slurm.try_out(read_file(run.script(found.phase)))
    except SlurmError as error:
        found.unknown.append(str(error))
        return
    if accepted:
        found.if_submitted_now = answer
    elif not found.lacks_nodes:
        found.problems.append(f"Slurm would refuse the job's script now: {answer}")


def _look_at_nodes(found: Diagnosis, slurm: Slurm) -> None:
    """Count the nodes of the job's partition by state, and list the unusable nodes."""
    state = slurm.show("partition", found.partition)[0]["State"]
    if trouble := _PARTITION.get(state, state):
        found.problems.append(f"partition {found.partition} is {trouble}")
    nodes = [n for n in slurm.show("node") if found.partition in n.get("Partitions", "").split(",")]
    states = {node["NodeName"]: node_state(node["State"]) for node in nodes}
    found.nodes = dict(Counter(states.values()))
    for node in nodes:
        if (word := states[node["NodeName"]]) in UNUSABLE:
            # Without the user and time that Slurm appends.
            reason = re.sub(r" \[\S+@\S+\]$", "", node.get("Reason", "").strip())
            reason = node_reason(reason) or "no reason given"
            found.sick.append(SickNode(name=node["NodeName"], state=word, reason=reason))
    usable = [n for n, s in states.items() if s not in UNUSABLE and n not in found.left_out]
    if len(usable) < found.nodes_needed:
        found.lacks_nodes = True
        fewer = f"trnslurm resume {found.run} --nodes {len(usable)}"
        found.problems.append(
            f"the job needs {found.nodes_needed} nodes, but only {len(usable)} of the "
            f"{len(nodes)} nodes in partition {found.partition} can run it"
            + (f": trnslurm cancel {found.run} && {fewer}" if usable else _NO_NODE)
        )
