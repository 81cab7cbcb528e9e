"""Diagnoses why a run is not running: what its job is waiting for, and which nodes are usable."""

from __future__ import annotations

import time

from trnslurm.contract.states import State
from trnslurm.records.run import RunDir
from trnslurm.runs.nodes import least_nodes
from trnslurm.runs.status import run_status
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.waiting import Diagnosis


def diagnose(run: RunDir) -> Diagnosis:
    """Return why a run is waiting, according to Slurm and its files."""
    record, status = run.record(), run_status(run)
    found = Diagnosis(run=run.name, state=status.state, reason=status.reason)
    for host, (until, why) in run.excluded().items():
        text = time.strftime("%Y-%m-%d %H:%M", time.localtime(until))
        found.left_out[host] = f"{why}, until {text}"
    if status.final and status.state is not State.COMPLETED:
        found.problems.append(f"it has ended: run trnslurm status {run.name} to see why")
    # Later phases wait for the first unfinished phase.
    phase = next((phase for phase in status.phases if phase.state is not State.COMPLETED), None)
    if phase is None or not (phase.state.waiting or phase.state is State.REQUEUED):
        return found
    found.phase, found.job_id = phase.phase, phase.job_id
    found.nodes_needed = least_nodes(run, record.nodes)
    scheduler = scheduler_of(record)
    if phase.state is State.HELD:
        by_slurm = scheduler.holds(phase)
        release = f"trnslurm resume {run.name}" if by_slurm else f"scontrol release {phase.job_id}"
        found.problems.append(f"job {phase.job_id} is held: {release}")
    scheduler.diagnose(found, run.script(found.phase))
    return found
