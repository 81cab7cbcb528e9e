"""Diagnoses why a Slurm job is waiting: what its partition has, and which nodes can be used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from trnslurm.contract.files import read_file
from trnslurm.errors import SlurmError
from trnslurm.schedulers.slurm.asked import nodes_of
from trnslurm.schedulers.waiting import Diagnosis, SickNode
from trnslurm.slurm.commands import Slurm
from trnslurm.slurm.reasons import UNUSABLE, node_reason, node_state

_PARTITION = {
    "INACTIVE": "inactive: on ParallelCluster, its fleet is stopped, or protected because nodes "
    "failed to boot; fix the cause, then run pcluster update-compute-fleet --status "
    "START_REQUESTED",
    "DOWN": "down: jobs are queued, but none starts until an administrator sets it UP",
    "DRAIN": "draining: it takes no new jobs",
}
_NO_NODE = ": wait until an admin returns a node to service, or submit the job to another partition"


def diagnose(found: Diagnosis, script: Path, slurm: Slurm) -> None:
    """Add what Slurm says about a waiting job."""
    try:
        job, *components = slurm.show("job", found.job_id)
        found.partition = job["Partition"]
        if re.match(r"\d{4}-", job["StartTime"]):
            found.start = job["StartTime"]
        _look_at_nodes(found, slurm)
        for component in components:
            if "HetJobOffset" in component:
                _look_at_component(found, component, slurm)
        accepted, answer = slurm.try_out(read_file(script))
    except SlurmError as error:
        found.unknown.append(str(error))
        return
    if accepted:
        found.if_submitted_now = answer
    elif not found.lacks_nodes:
        found.problems.append(f"Slurm would now reject the job's script: {answer}")


def _look_at_component(found: Diagnosis, component: Mapping[str, str], slurm: Slurm) -> None:
    """Check whether the roles' partition has enough nodes for a component of the job."""
    partition, wanted = component["Partition"], re.match(r"\d+", component.get("NumNodes", ""))
    states = _states_in(partition, found, slurm)
    usable = [state for state in states.values() if state not in UNUSABLE]
    needed = int(wanted[0]) if wanted else 1
    if len(usable) < needed:
        found.lacks_nodes = True
        found.problems.append(
            f"the job's roles need {needed} of the {len(states)} nodes in partition {partition}, "
            f"but only {len(usable)} can run them{_NO_NODE}"
        )


def _states_in(partition: str, found: Diagnosis, slurm: Slurm) -> dict[str, str]:
    """Return the states of the nodes in a job's partition, and list the unusable ones."""
    names = partition.split(",")
    own = {p["PartitionName"]: p["State"] for p in slurm.show("partition")}
    if not any(own.get(name) == "UP" for name in names):
        known = {name: own[name] for name in names if name in own}
        found.problems += [f"partition {n} is {_PARTITION.get(s, s)}" for n, s in known.items()]
    nodes = nodes_of(names, slurm)
    states = {node["NodeName"]: node_state(node["State"]) for node in nodes}
    for node in nodes:
        if (word := states[node["NodeName"]]) in UNUSABLE:
            # Without the user and time that Slurm appends.
            reason = re.sub(r" \[\S+@\S+\]$", "", node.get("Reason", "").strip())
            reason = node_reason(reason) or "no reason given"
            found.sick.append(SickNode(name=node["NodeName"], state=word, reason=reason))
    return states


def _look_at_nodes(found: Diagnosis, slurm: Slurm) -> None:
    """Count the nodes of the job's partition by state, and check whether there are enough."""
    states = _states_in(found.partition, found, slurm)
    found.nodes = dict(Counter(states.values()))
    usable = [n for n, s in states.items() if s not in UNUSABLE and n not in found.left_out]
    if len(usable) < found.nodes_needed:
        found.lacks_nodes = True
        healthy = [n for n, s in states.items() if s not in UNUSABLE]
        again = f"trnslurm cancel {found.run} && trnslurm resume {found.run}"
        way = f": {again} --nodes {len(usable)}" if usable else _NO_NODE
        if len(healthy) >= found.nodes_needed:
            way += f"; {again} uses the excluded nodes again"
        found.problems.append(
            f"the job needs {found.nodes_needed} nodes, but only {len(usable)} of the "
            f"{len(states)} nodes in partition {found.partition} can run it{way}"
        )
