"""Submits a run again, in the same directory: it resumes from its newest checkpoint.

Whatever ended it, nothing of it may be left in the queue, and the controller must say so. The job
finds the checkpoint by itself; a run whose training never began begins with it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.cluster.cache import CompileCache
from trnslurm.console import Console
from trnslurm.errors import ConfigError, NotYetError, RunError
from trnslurm.frozen import Frozen
from trnslurm.rundir import NODE_SCRIPT, PREPARE, changed_at
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.phase import JOB_ENDED, LAUNCH_HELD, STARTABLE, held_by_slurm, is_live
from trnslurm.runs.process import local_job_alive
from trnslurm.runs.run import Record, RunDir
from trnslurm.runs.status import STOP_AT, RunStatus, run_status, statuses_of
from trnslurm.slurm.commands import QueueEntry, Slurm, find_job
from trnslurm.submit.here import check_here, check_notify
from trnslurm.submit.job import Job, read_job
from trnslurm.submit.lock import lock_run
from trnslurm.submit.resize import adopt_files, resize, set_notify, set_stop_at
from trnslurm.submit.submission import PlannedRun, Submission, WaitsFor
from trnslurm.submit.submit import submit

_ENDING_S = 60  # a job that is completing is gone after the site's KillWait and its epilogue
_POLL_S = 0.5
_SILENT_S = 65  # two heartbeats were missed


class Continuation(Frozen):
    """How a run continues, where that is not as it was submitted."""

    nodes: int | None = None
    stop_at: int | None = None
    """The step after which it ends; 0: its last. None: where it was to end, or after that."""
    notify: Sequence[str] = ()
    """The values of --notify, for the runs that wait for it too."""
    template_dirs: Sequence[Path] = ()

    def check(self) -> None:
        """Refuse numbers that no run can have."""
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes}: a job needs at least one node")
        if self.stop_at is not None and self.stop_at < 0:
            raise ConfigError(f"--stop-at {self.stop_at}: steps count from 1; 0: the last")

    def changes(self, nodes: int) -> bool:
        """Check whether a run on so many nodes is changed."""
        return self.nodes not in (None, nodes) or self.stop_at is not None or bool(self.notify)

    def job_of(self, run: RunDir) -> Job:
        """Return the job to submit: the files of the run, or those for another node count."""
        job = read_job(run.path)
        now = job.bundle.sha256()
        if changed := [n for n, sha in run.record().sha256.items() if now.get(n) != sha]:
            raise RunError(
                f"{run.path / changed[0]} is not as it was submitted: submit it as a new run"
            )
        check_here(job)
        if self.nodes in (None, job.nodes):
            return job
        return resize(run, job, self.nodes, self.template_dirs)


class Resumed(Frozen):
    """What was done so that a run continues."""

    runs: list[RunDir]
    """The run, and those that wait for it."""
    released: tuple[str, ...] = ()
    """Jobs that were held and now continue; nothing was submitted then."""


def resume(run: RunDir, how: Continuation, console: Console) -> Resumed:
    """Submit a run again, and those of its chain that wait for it.

    A run that is only held by Slurm, because its launch failed, is released instead.
    """
    how.check()
    chain = list(_with_waiting(run))
    with contextlib.ExitStack() as locks:
        for each in chain:
            locks.enter_context(lock_run(each))
        statuses = [_refuse_unfit(each, waiting=each != run) for each in chain]
        record = run.record()
        if statuses[0].state == "COMPLETED":
            how = replace(how, stop_at=how.stop_at or 0)
        held = not how.changes(record.nodes) and statuses[0].state == "HELD"
        if held and (released := _held_after_launch(run, record, statuses[0])):
            for released_job in released:
                Slurm(record.bin_dir).release(released_job)
            return Resumed(runs=[run], released=tuple(released))
        jobs = [how.job_of(each) for each in chain]
        _refuse_start_over(run, jobs[0])
        if how.stop_at is not None:
            jobs[0] = set_stop_at(run, jobs[0], how.stop_at)
        if how.notify:
            jobs = [set_notify(r, job, how.notify) for r, job in zip(chain, jobs, strict=True)]
            for warning in check_notify(jobs[0]):
                console.warn(warning)
        waits_for = [_waits_for(run, record)]
        waits_for += [WaitsFor(success=previous.name) for previous in chain[:-1]]
        # The last first: a job that waits for one that is cancelled would be dropped by Slurm.
        for each in reversed(chain):
            _end_leftovers(each, each.record())
        planned = [
            PlannedRun(job=job, waits_for=awaited, resumes=each, ended=status)
            for job, awaited, each, status in zip(jobs, waits_for, chain, statuses, strict=True)
        ]
        submit(Submission(runs=planned, cache=CompileCache(jobs[0].profile)), (), console)
    return Resumed(runs=chain)


def resume_sweep(runs: Sequence[RunDir], how: Continuation, console: Console) -> list[RunDir]:
    """Resume those runs of a sweep that have ended and did not complete; return them."""
    statuses, broken = statuses_of(runs)
    if broken:
        raise broken[0]
    ended = [
        run
        for run, status in zip(runs, statuses, strict=True)
        if status.final and (status.state != "COMPLETED" or status.mend)
    ]
    if not ended:
        group = statuses[0].group
        raise RunError(f"{group}: no run of it stopped short: trnslurm status {group}")
    for run in ended:
        resume(run, how, console)
    return ended


def _with_waiting(run: RunDir) -> Iterator[RunDir]:
    """Yield a run, and those of its chain that have not begun."""
    next_run: RunDir | None = run
    while next_run:
        refuse_foreign(next_run.path, "resume")
        record = next_run.record()
        if next_run != run and any(next_run.attempts_since(record, p) for p in record.phases):
            return  # it has begun with what this run had then
        yield next_run
        next_run = next_run.sibling(record.then) if record.then else None


def _refuse_unfit(run: RunDir, *, waiting: bool) -> RunStatus:
    """Refuse a run that has completed, or that continues by itself, or may."""
    adopt_files(run)  # an earlier resume may have been interrupted
    record, name = run.record(), run.name
    if PREPARE in record.phases:
        raise RunError(f"{name} prepares data: submit it again, and it continues where it was")
    status = run_status(run)
    if status.state == "COMPLETED" and not status.mend:
        stopped = status.reason.startswith(STOP_AT)
        why = f" ({status.reason}) and has no checkpoint" if stopped else ""
        raise RunError(f"{name} is COMPLETED{why}: there is nothing to resume")
    if status.state == "COMPLETED":
        return status
    # What waits for a run that has ended never starts, though Slurm may not have noticed yet.
    if waiting and status.state == "PENDING":
        return status
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise RunError(f"{name} runs on {record.host}: resume it there")
    if not status.final and run.cancelled_file.exists():
        raise NotYetError(f"{name} is being cancelled: resume it once it has ended")
    held = status.state == "HELD" and any(map(held_by_slurm, status.phases))
    if not status.final and not held:
        reason = f" ({status.reason})" if status.reason else ""
        raise NotYetError(
            f"{name} is {status.state}{reason}: let it run, or `trnslurm cancel {name}` first"
        )
    # Slurm has no record of it, but its script shows life, as on a node cut off.
    last = [a for phase in record.phases for a in run.attempts_since(record, phase)][-1:]
    age_s = run.heartbeat_age_s()
    lost = record.scheduler == "slurm" and status.state == "LOST"
    running = bool(last) and last[0].state == "RUNNING"
    if lost and running and age_s is not None and age_s < _SILENT_S:
        raise NotYetError(
            f"{name} is LOST, but its script showed life {age_s:.0f} s ago: "
            f"resume it in {_SILENT_S - age_s:.0f} s, if it has been silent until then"
        )
    return status


def _refuse_start_over(run: RunDir, job: Job) -> None:
    """Refuse a script that takes {resume} and has saved something without calling saved()."""
    takes = b'"$TRNSLURM_RESUME"' in job.bundle.files[NODE_SCRIPT]
    if takes and run.newest_checkpoint() is None and changed_at(run.checkpoints):
        raise RunError(
            f"{run.name} has told of no checkpoint, so it would begin at step 0, and may write "
            f"over what is in {run.checkpoints}: call trnslurm.saved() in it, and submit it again"
        )


def _held_after_launch(run: RunDir, record: Record, status: RunStatus) -> list[str]:
    """Return the jobs to release, if that is all that the run needs to continue."""
    queue = Slurm(record.bin_dir).queue([record.user])
    held = [p.job_id for p in status.phases if (p.state, p.reason) == ("HELD", LAUNCH_HELD)]
    unfinished = [p.job_id for p in status.phases if p.state != "COMPLETED"]
    return held if all(is_live(find_job(queue, job, run.path)) for job in unfinished) else []


def _waits_for(run: RunDir, record: Record) -> WaitsFor:
    """Return the runs for which a run waits that have not ended since."""
    success = ""
    if record.after:
        previous = run.sibling(record.after)
        status = run_status(previous)
        if status.state != "COMPLETED":
            if status.final or record.scheduler == "local":
                raise RunError(f"{run.name} continues {previous.name}, which is {status.state}")
            success = previous.name
    try:
        ended = not record.behind or run_status(run.sibling(record.behind)).final
    except RunError:  # removed since
        ended = True
    return WaitsFor(success=success, end="" if ended else record.behind)


def _end_leftovers(run: RunDir, record: Record) -> None:
    """Leave nothing of an ended run in the queue: cancel jobs that wait, refuse one that runs."""
    deadline = time.monotonic() + _ENDING_S
    if record.scheduler == "local":  # its processes end a moment after its script's last word
        while local_job_alive(record) or _script_alive(run, record):
            if time.monotonic() > deadline:
                raise NotYetError(
                    f"{run.name} still has processes here: trnslurm cancel {run.name}"
                )
            time.sleep(_POLL_S)
        return
    slurm = Slurm(record.bin_dir)
    cancelled: set[str] = set()
    while left := _jobs_left(run, record, slurm):
        running = [j for j, e in left.items() if e.state not in {*STARTABLE, "COMPLETING"}]
        if running or time.monotonic() > deadline:
            ids = ", ".join(running or left)
            raise NotYetError(
                f"{run.name} still has job {ids}: `trnslurm cancel {run.name}`, and wait for its "
                "end"
            )
        waiting = {job for job, entry in left.items() if entry.state in STARTABLE} - cancelled
        if waiting:
            slurm.cancel(sorted(waiting, reverse=True))
            cancelled |= waiting
        time.sleep(_POLL_S)


def _jobs_left(run: RunDir, record: Record, slurm: Slurm) -> dict[str, QueueEntry]:
    """Return the jobs of a run that have not ended; a controller that is silent is an error."""
    ours = {*record.jobs.values(), *slurm.jobs_in(str(run.path), record.user)}
    queue = slurm.queue([record.user])
    found = {job: find_job(queue, job, run.path) for job in sorted(ours)}
    return {job: entry for job, entry in found.items() if entry and entry.state not in JOB_ENDED}


def _script_alive(run: RunDir, record: Record) -> bool:
    """Check whether a batch script of the run still runs here, by its working directory."""
    pids = [attempt.pid for phase in record.phases for attempt in run.attempts(phase)]
    for pid in filter(None, pids):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink() == run.path.resolve():
                return True
    return False
