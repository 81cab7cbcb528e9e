"""Submits a run again whose training never began, in the same directory.

This is the way on after a precompile that failed: Slurm has then dropped the training that waited
for it. A training that has begun is not resumed yet.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from trnslurm.errors import RunError
from trnslurm.phase_status import is_live
from trnslurm.run import Record, RunDir
from trnslurm.slurm import Slurm
from trnslurm.status import RunStatus, run_status
from trnslurm.submit.job import Job, job_of_bundle, refuse_unprepared
from trnslurm.trust import refuse_foreign


def what_to_resume(run: RunDir) -> list[tuple[RunDir, Job]]:
    """Return a run and those that wait for its end, with their bundles; refuse what cannot be."""
    found: list[tuple[RunDir, Job]] = []
    next_run: RunDir | None = run
    while next_run:
        refuse_foreign(next_run.path, "resume")
        record = next_run.record()
        _refuse_begun(next_run, record, run_status(next_run))
        found.append((next_run, _job_as_submitted(next_run, record)))
        next_run = next_run.beside(record.then) if record.then else None
    return found


def begin_anew(run: RunDir, job: Job) -> None:
    """Make its record that of a run not yet submitted; its attempts are counted on."""
    earlier = {p: last[-1].attempt for p in job.phases if (last := run.attempts(p))}
    run.write_record(replace(run.record(), jobs={}, refused="", earlier=earlier))
    run.cancelled_file.unlink(missing_ok=True)


def job_ahead(run: RunDir) -> str:
    """Return the job that the run must wait for: the last of the run before it, if that goes on."""
    record = run.record()
    if not record.after:
        return ""
    ahead = run.beside(record.after)
    status = run_status(ahead)
    if status.state == "COMPLETED":
        return ""
    if status.final or record.scheduler == "local":
        raise RunError(f"{run.name} goes on from {ahead.name}, which is {status.state}")
    return ahead.record().jobs[record.phases[-1]]


def _refuse_begun(run: RunDir, record: Record, status: RunStatus) -> None:
    if "train" not in record.phases:
        raise RunError(f"{run.name} prepares data: submit it again, it goes on where it was")
    if status.state == "COMPLETED":
        raise RunError(f"{run.name} is COMPLETED: there is nothing to resume")
    if any(not phase.final for phase in status.phases) or not status.final:
        raise RunError(f"{run.name} is {status.state}: cancel it first, or let it go on")
    if run.attempts("train"):
        raise RunError(
            f"{run.name} is {status.state}, and its training has begun: resume cannot do that yet; "
            f"trnslurm submit {record.recipe} --from {run.name} begins with its newest checkpoint"
        )
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise RunError(f"{run.name} runs on {record.host}: resume it there")
    # What is forgotten by the controller, or was never told to us, may still wait in its queue.
    if record.scheduler == "slurm" and (left := _still_queued(run, record)):
        raise RunError(f"{run.name} still has the jobs {', '.join(left)}: cancel them first")


def _still_queued(run: RunDir, record: Record) -> list[str]:
    slurm = Slurm(record.bin_dir)
    there = set(slurm.jobs_in(str(run.path), record.user).values())
    queue = slurm.queue([record.user])
    return sorted(job for job in there if is_live(queue.get(job)))


def _job_as_submitted(run: RunDir, record: Record) -> Job:
    """Read the bundle back, and prove that it is the one that was submitted."""
    job = job_of_bundle(run.path)
    now = job.bundle.sha256()
    if changed := [name for name, sha in record.sha256.items() if now.get(name) != sha]:
        raise RunError(f"{run.path / changed[0]} is not as it was submitted: submit it anew")
    refuse_unprepared(job)
    return job
