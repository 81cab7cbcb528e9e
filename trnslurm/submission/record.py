"""Creates run.json for a new run, or renews it for a resumed run."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trnslurm import __version__
from trnslurm.contract.times import utc_time
from trnslurm.records.foreign import this_user
from trnslurm.records.run import Record, RunDir
from trnslurm.submission.precompile import Need
from trnslurm.submission.resize import adopt_files, lay_aside
from trnslurm.submission.submission import PlannedRun


def new_record(
    run: RunDir, planned: PlannedRun, need: Need, git: Mapping[str, Any], command: Sequence[str]
) -> Record:
    """Return the record of a new run."""
    job, waits_for = need.job, planned.waits_for
    return Record(
        run=run.name,
        name=job.name,
        recipe=job.recipe,
        preset=job.preset,
        cluster=job.cluster,
        scheduler=job.profile.scheduler,
        nodes=job.nodes,
        # A precompile-only job ends at once if its graphs are compiled.
        phases=need.phases or job.phases,
        created=utc_time(),
        user=this_user(),
        host=socket.gethostname(),
        bin_dir=job.profile.slurm.bin_dir,
        command=tuple(command),
        versions={
            "trnslurm": __version__,
            "python": platform.python_version(),
            "submitit": importlib.metadata.version("submitit"),
        },
        git=git,
        sha256=job.bundle.sha256(),
        after=next(iter(waits_for.success), "") if not planned.made_of else "",
        needs=waits_for.success,
        values=planned.values,
        made_of=planned.made_of,
        behind=waits_for.end,
        copied_from=planned.fetches,
        depends=waits_for.jobs,
        precompile=need.record(),
        origins=job.origins,
    )


def renew_record(run: RunDir, planned: PlannedRun, need: Need) -> None:
    """Reset run.json for resubmission and put changed files in place. Attempt numbers continue."""
    job, record, status = need.job, run.record(), planned.ended
    before = {
        "nodes": record.nodes,
        "jobs": dict(record.jobs),
        "state": status.state if status else "",
        "reason": status.reason if status else "",
        "resumed": utc_time(),
    }
    again = replace(
        record,
        nodes=job.nodes,
        phases=need.phases or job.phases,
        jobs={},
        depends="",
        refused="",
        precompile=need.record(),
        earlier={p: last[-1].attempt for p in job.phases if (last := run.attempts(p))},
        history=(*record.history, before) if record.jobs else record.history,
        sha256=job.bundle.sha256(),
    )
    lay_aside(run, job.bundle)
    run.write_record(again)
    adopt_files(run)
    run.cancelled_file.unlink(missing_ok=True)
