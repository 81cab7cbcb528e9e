"""Follows a run until it ends: its status, again and again, at a bearable price."""

from __future__ import annotations

import time
from collections.abc import Iterator

from trnslurm.run import RunDir
from trnslurm.status import RunStatus, run_status

_LOCAL_POLL_S = 0.3
_SLURM_POLL_S = 5.0  # each look is one squeue call on the cluster's controller


def follow(run: RunDir) -> Iterator[RunStatus]:
    """Yield the status now and after every poll; the last one is final."""
    poll_s = _LOCAL_POLL_S if run.record().scheduler == "local" else _SLURM_POLL_S
    while True:
        status = run_status(run)
        yield status
        if status.final:
            return
        time.sleep(poll_s)
