"""Cancels the jobs of runs on Slurm: running training saves first, all other jobs end at once."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from trnslurm.contract.checkpoints import reported_step
from trnslurm.contract.files import read_file
from trnslurm.contract.metrics import is_reported
from trnslurm.contract.states import State
from trnslurm.errors import NotYetError
from trnslurm.records.run import Record, RunDir
from trnslurm.slurm.commands import QueueEntry, Slurm, find_job
from trnslurm.slurm.states import COMPLETING, RUNNING

_ENDING_S = 60  # covers the site's KillWait and epilogue
_POLL_S = 0.5
_TRAIN = "train"
# The program that handles the signal; scripts of earlier versions handled it themselves.
_SAVES = re.compile(rb"^(exec .*trnslurm\.node\.attempt|\s*trap .*\bUSR1)\b", re.MULTILINE)


def cancel(records: Mapping[RunDir, Record], slurm: Slurm, *, now: bool) -> set[RunDir]:
    """Cancel the jobs of runs; return the runs that save first."""
    users = sorted({record.user for record in records.values()})
    known = [job for record in records.values() for job in record.jobs.values()]
    queue = slurm.queue(users, known=known)
    training = {} if now else {run: _training(run, queue) for run in records}
    saving = {run: job for run, job in training.items() if job}
    # The submission of these runs was interrupted.
    partial = [str(r.path) for r, rec in records.items() if not {*rec.phases} <= {*rec.jobs}]
    found = [job for user in users for job in (slurm.jobs_in(partial, user) if partial else ())]
    jobs = [
        job
        for run, record in records.items()
        for job in record.jobs.values()
        if job not in queue or find_job(queue, job, run.path)
    ]
    # Last phase first: the end of an earlier phase could release it.
    jobs = [*dict.fromkeys([*found, *jobs[::-1]])]
    if jobs := [job for job in jobs if job not in saving.values()]:
        slurm.cancel(jobs)
    slurm.ask_to_stop([job for job in saving.values() if "." not in job])
    for run, job in saving.items():
        if "." in job:
            last = run.attempts(_TRAIN)[-1]
            slurm.ask_step_to_stop(job, last.hosts.partition(",")[0], last.pid)
    return {*saving}


def _training(run: RunDir, queue: Mapping[str, QueueEntry]) -> str:
    """Return the running training job that saves a checkpoint on the signal; empty if none does.

    The batch script must handle the signal, because the signal would kill a script that does not.
    """
    record = run.record()
    job = record.jobs.get(_TRAIN, "")
    last = run.attempts_since(record, _TRAIN)[-1:]
    if not job or not last or (last[0].state, last[0].job_id) != (State.RUNNING, job):
        return ""
    # A custom script that reported nothing does not check for a stop, or has nothing to save.
    metrics = run.last_metrics()
    reports = is_reported(metrics) and metrics.get("attempt") == last[0].attempt
    told = reports or reported_step(run)
    if run.project_file.exists() and not told:
        return ""
    try:
        saves = _SAVES.search(read_file(run.script(_TRAIN)))
    except OSError:
        return ""
    entry = find_job(queue, job, run.path)
    return job if saves and entry and entry.state == RUNNING else ""


def end_leftovers(run: RunDir, record: Record, slurm: Slurm) -> None:
    """Clear an ended run's jobs from the queue: cancel waiting jobs, refuse if one is running."""
    deadline = time.monotonic() + _ENDING_S
    cancelled: set[str] = set()
    while left := _jobs_left(run, record, slurm):
        running = [j for j, e in left.items() if not (e.startable or e.state == COMPLETING)]
        if running or time.monotonic() > deadline:
            ids = ", ".join(running or left)
            raise NotYetError(
                f"{run.name} still has job {ids}: run `trnslurm cancel {run.name}`, and wait until "
                "it has ended"
            )
        waiting = {job for job, entry in left.items() if entry.startable} - cancelled
        if waiting:
            slurm.cancel(sorted(waiting, reverse=True))
            cancelled |= waiting
        time.sleep(_POLL_S)


def _jobs_left(run: RunDir, record: Record, slurm: Slurm) -> dict[str, QueueEntry]:
    """Return a run's jobs that have not ended; raise an error if the controller does not answer."""
    ours = {*record.jobs.values(), *slurm.jobs_in([str(run.path)], record.user)}
    queue = slurm.queue([record.user], known=ours)
    found = {job: find_job(queue, job, run.path) for job in sorted(ours)}
    return {job: entry for job, entry in found.items() if entry and not entry.ended}
