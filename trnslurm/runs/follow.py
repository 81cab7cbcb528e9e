"""Follows a run until it ends: its status, again and again, at a bearable price."""

from __future__ import annotations

import time
from collections.abc import Iterator

from trnslurm.runs.process import local_job_alive
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, run_status

_LOCAL_POLL_S = 0.3
_LOCAL_END_POLL_S = 0.02
_LOCAL_END_POLLS = 1500  # half a minute
_SLURM_POLL_S = 5.0  # each look is one squeue call on the cluster's controller


def follow(run: RunDir, every_s: float | None = None) -> Iterator[RunStatus]:
    """Yield the status now and after every poll; the last one is final."""
    poll_s = every_s or (_LOCAL_POLL_S if run.record().scheduler == "local" else _SLURM_POLL_S)
    while True:
        status = run_status(run)
        yield status
        if status.final:
            # A run that waited for this one goes on in the same local job.
            if not (status.then and status.state == "COMPLETED"):
                _await_local_end(run)
            return
        time.sleep(poll_s)


def _await_local_end(run: RunDir) -> None:
    """Wait for the local job's processes, which end a moment after the script's last word."""
    record = run.record()
    for _ in range(_LOCAL_END_POLLS):
        if not local_job_alive(record):
            return
        time.sleep(_LOCAL_END_POLL_S)
