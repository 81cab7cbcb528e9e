"""The facts that `status --json` prints about a run: its status and related records."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trnslurm.records.run import RunDir
from trnslurm.runs.followers import followers_of
from trnslurm.runs.mirrored import mirrored
from trnslurm.runs.nodes import spares_of
from trnslurm.runs.restarts import restarted
from trnslurm.runs.roles import servers_of
from trnslurm.runs.saved import saved
from trnslurm.runs.status import RunStatus
from trnslurm.runs.usage import usage_of

if TYPE_CHECKING:
    from trnslurm.node.triage.finding import Finding


def facts_of(run: RunDir, status: RunStatus, failure: Finding | None) -> dict[str, Any]:
    """Return everything that is known about a run."""
    spares, copies = spares_of(run, status.attempts), mirrored(run)
    again, left = restarted(run, status), saved(run)
    return {
        **asdict(status),
        "failure": asdict(failure) if failure else None,
        "spares": {**asdict(spares), "left": spares.left} if spares else None,
        "usage": usage_of(run, status).facts(),
        "mirror": asdict(copies) if copies else None,
        "restarted": asdict(again) if again else None,
        "saved": asdict(left) if left else None,
        "servers": [asdict(each) for each in servers_of(run)],
        "followers": [asdict(each) for each in followers_of(run)],
    }
