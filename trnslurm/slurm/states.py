"""What Slurm's job states mean: https://slurm.schedmd.com/job_state_codes.html."""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.contract.states import State

CONFIGURING, RUNNING, SUSPENDED, COMPLETING = "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"
CANCELLED, COMPLETED, FAILED = "CANCELLED", "COMPLETED", "FAILED"
STARTABLE = {
    *("PENDING", "REQUEUED", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_HOLD"),
    "EXPEDITING",  # since Slurm 25.11
}
ALIVE = {
    *(RUNNING, COMPLETING, SUSPENDED),
    *("SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"),
}
ENDED: Mapping[str, tuple[State, str]] = {
    "BOOT_FAIL": (State.FAILED, "its nodes failed to boot"),
    CANCELLED: (State.CANCELLED, ""),
    COMPLETED: (State.COMPLETED, ""),
    "DEADLINE": (State.TIMEOUT, "its deadline passed"),
    FAILED: (State.FAILED, ""),
    "NODE_FAIL": (State.NODE_FAIL, "a node failed"),
    "OUT_OF_MEMORY": (State.FAILED, "out of host memory"),
    "PREEMPTED": (State.PREEMPTED, ""),
    "TIMEOUT": (State.TIMEOUT, "time limit"),
}
"""The states of a job that has ended -> the state of its run, and why."""
