"""Submits a run again, in the same directory: it goes on from its newest checkpoint.

Whatever ended it, nothing of it may be left in the queue, and the controller must say so. The job
finds the checkpoint by itself; a run whose training never began begins with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trnslurm.cluster.cache import CompileCache
from trnslurm.errors import RunError
from trnslurm.plan.data import PREPARE
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.run import Record, RunDir
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.slurm.commands import Slurm
from trnslurm.submit.claiming import Claims
from trnslurm.submit.job import Job, job_of_bundle, refuse_unprepared
from trnslurm.submit.leftovers import end_leftovers, held_after_launch, refuse_living
from trnslurm.submit.resizing import adopt_files, lay_aside, resized
from trnslurm.submit.starting import privacy_of, starter, utc_now
from trnslurm.submit.turns import turn


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What was done so that a run goes on."""

    runs: list[RunDir]
    """The run, and those that wait for it."""
    released: tuple[str, ...] = ()
    """Jobs that were held, and now go on; nothing was submitted then."""


@dataclass(frozen=True)
class _Found:
    """One run that is to be submitted again."""

    run: RunDir
    job: Job
    status: RunStatus


def resume(
    run: RunDir, *, nodes: int | None = None, template_dirs: Sequence[Path] = (),
    detach: bool = False, say: Callable[[str], None] = lambda text: None,
) -> Resumed:  # fmt: skip
    """Submit a run again, on `nodes` nodes if that is another number, and those that wait for it.

    A run that is only held by Slurm, because its launch failed, is released instead.
    """
    chain = list(_with_waiting(run))
    with contextlib.ExitStack() as turns:
        for each in chain:
            turns.enter_context(turn(each))
        statuses = [_refuse_unfit(each, waiting=each != run) for each in chain]
        record = run.record()
        if nodes in (None, record.nodes) and (released := _release(run, record, statuses[0])):
            return Resumed(runs=[run], released=released)
        found = [
            _Found(each, _job_again(each, nodes, template_dirs), status)
            for each, status in zip(chain, statuses, strict=True)
        ]
        _submit(found, after=_job_ahead(run), detach=detach, say=say)
    return Resumed(runs=chain)


def _submit(
    found: Sequence[_Found], *, after: str, detach: bool, say: Callable[[str], None]
) -> None:
    job = found[0].job
    start = starter(job, detach=detach, after=after)
    # The last first: a job that waits for one that is cancelled would be dropped by Slurm.
    for each in reversed(found):
        end_leftovers(each.run, each.run.record())
    with privacy_of(job), Claims(CompileCache(job.profile), say) as claims:
        for each in found:
            _begin_anew(each)
            claims.settle(each.job, each.run)
        start([each.run for each in found])
        claims.complete()


def _with_waiting(run: RunDir) -> Iterator[RunDir]:
    next_run: RunDir | None = run
    while next_run:
        refuse_foreign(next_run.path, "resume")
        record = next_run.record()
        yield next_run
        next_run = next_run.beside(record.then) if record.then else None


def _refuse_unfit(run: RunDir, *, waiting: bool) -> RunStatus:
    adopt_files(run)  # an earlier resume may have been interrupted
    record = run.record()
    if PREPARE in record.phases:
        raise RunError(f"{run.name} prepares data: submit it again, it goes on where it was")
    status = run_status(run)
    if status.state == "COMPLETED":
        raise RunError(f"{run.name} is COMPLETED: there is nothing to resume")
    # What waits for a run that has ended never starts, though Slurm may not have noticed yet.
    if not (waiting and status.state == "PENDING"):
        refuse_living(run, record, status)
    return status


def _release(run: RunDir, record: Record, status: RunStatus) -> tuple[str, ...]:
    """Release the jobs of a run that needs no more than that, and return them."""
    if status.state != "HELD":
        return ()
    held = held_after_launch(run, record, status)
    for job in held:
        Slurm(record.bin_dir).release(job)
    return tuple(held)


def _job_again(run: RunDir, nodes: int | None, template_dirs: Sequence[Path]) -> Job:
    """Return what is submitted: the very files that were, or those for another node count."""
    job = job_of_bundle(run.path)
    now = job.bundle.sha256()
    if changed := [name for name, sha in run.record().sha256.items() if now.get(name) != sha]:
        raise RunError(f"{run.path / changed[0]} is not as it was submitted: submit it anew")
    refuse_unprepared(job)
    return job if nodes in (None, job.nodes) else resized(run, job, nodes, template_dirs)


def _begin_anew(found: _Found) -> None:
    """Make its record that of a run not yet submitted; its attempts are counted on."""
    run, job, record = found.run, found.job, found.run.record()
    earlier = {p: last[-1].attempt for p in job.phases if (last := run.attempts(p))}
    before = {
        "nodes": record.nodes, "jobs": dict(record.jobs), "state": found.status.state,
        "reason": found.status.reason, "resumed": utc_now(),
    }  # fmt: skip
    history = (*record.history, before) if record.jobs else record.history
    anew = replace(record, nodes=job.nodes, jobs={}, refused="", earlier=earlier, history=history)
    lay_aside(run, job.bundle)
    run.write_record(replace(anew, sha256=job.bundle.sha256()))
    adopt_files(run)
    run.cancelled_file.unlink(missing_ok=True)


def _job_ahead(run: RunDir) -> str:
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
