"""Submits a run again, in the same directory: it resumes from its newest checkpoint.

Whatever ended it, nothing of it may be left in the queue, and the controller must say so. The job
finds the checkpoint by itself; a run whose training never began begins with it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.cluster.cache import CompileCache
from trnslurm.errors import ConfigError, NotYetError, RunError
from trnslurm.frozen import Frozen
from trnslurm.rundir import NODE_SCRIPT, PREPARE, changed_at
from trnslurm.runs.foreign import refuse_foreign
from trnslurm.runs.phase import JOB_ENDED, LAUNCH_HELD, STARTABLE, held_by_slurm, is_live
from trnslurm.runs.process import local_job_alive
from trnslurm.runs.run import Record, RunDir, utc_now
from trnslurm.runs.status import STOP_AT, RunStatus, run_status, statuses_of
from trnslurm.slurm.commands import QueueEntry, Slurm, find_job
from trnslurm.submit.claims import Claims
from trnslurm.submit.here import check_here, check_notify
from trnslurm.submit.job import Job, read_job
from trnslurm.submit.lock import lock_run
from trnslurm.submit.precompile import Need
from trnslurm.submit.resize import adopt_files, lay_aside, resize, set_notify, set_stop_at
from trnslurm.submit.submit import privacy_of, starter

_ENDING_S = 60  # a job that is completing is gone after the site's KillWait and its epilogue
_POLL_S = 0.5
_SILENT_S = 65  # two heartbeats were missed


class Resumed(Frozen):
    """What was done so that a run continues."""

    runs: list[RunDir]
    """The run, and those that wait for it."""
    released: tuple[str, ...] = ()
    """Jobs that were held and now continue; nothing was submitted then."""


def resume(
    run: RunDir, *, nodes: int | None = None, stop_at: int | None = None,
    notify: Sequence[str] = (), template_dirs: Sequence[Path] = (), detach: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Resumed:  # fmt: skip
    """Submit a run again, on `nodes` nodes if that is another number, and those that wait for it.

    It ends after the step `stop_at` (0: its last). Without one it ends where it was to end, or if
    it has ended there, with its last step. `notify` are the values of --notify, for all of them.

    A run that is only held by Slurm, because its launch failed, is released instead.
    """
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes {nodes}: a job needs at least one node")
    if stop_at is not None and stop_at < 0:
        raise ConfigError(f"--stop-at {stop_at}: steps count from 1; 0: the last")
    chain = list(_with_waiting(run))
    with contextlib.ExitStack() as locks:
        for each in chain:
            locks.enter_context(lock_run(each))
        statuses = [_refuse_unfit(each, waiting=each != run) for each in chain]
        record = run.record()
        if statuses[0].state == "COMPLETED":
            stop_at = stop_at or 0
        other = nodes not in (None, record.nodes) or stop_at is not None or bool(notify)
        held = not other and statuses[0].state == "HELD"
        if held and (released := _held_after_launch(run, record, statuses[0])):
            for released_job in released:
                Slurm(record.bin_dir).release(released_job)
            return Resumed(runs=[run], released=tuple(released))
        jobs = [_job_again(each, nodes, template_dirs) for each in chain]
        _refuse_to_begin_anew(run, jobs[0])
        if stop_at is not None:
            jobs[0] = set_stop_at(run, jobs[0], stop_at)
        if notify:
            jobs = [set_notify(each, job, notify) for each, job in zip(chain, jobs, strict=True)]
            for warning in check_notify(jobs[0]):
                say(f"warning: {warning}")
        start = starter(
            jobs[0], detach=detach, after=_job_ahead(run), behind=_making_room(run, record)
        )
        # The last first: a job that waits for one that is cancelled would be dropped by Slurm.
        for each in reversed(chain):
            _end_leftovers(each, each.record())
        with privacy_of(jobs[0]), Claims(CompileCache(jobs[0].profile), say) as claims:
            needs = [
                claims.decide(job, each, waits=bool(each.record().after))
                for job, each in zip(jobs, chain, strict=True)
            ]
            for need, each, status in zip(needs, chain, statuses, strict=True):
                _begin_again(need, each, status)
            start(chain)
            claims.complete()
    return Resumed(runs=chain)


def resume_sweep(
    runs: Sequence[RunDir], *, nodes: int | None = None, stop_at: int | None = None,
    notify: Sequence[str] = (), template_dirs: Sequence[Path] = (), detach: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[RunDir]:  # fmt: skip
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
        resume(
            run, nodes=nodes, stop_at=stop_at, notify=notify, template_dirs=template_dirs,
            detach=detach, say=say,
        )  # fmt: skip
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
        next_run = next_run.beside(record.then) if record.then else None


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


def _refuse_to_begin_anew(run: RunDir, job: Job) -> None:
    """Refuse a script that takes {resume}, and has saved something of which it never told."""
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


def _job_again(run: RunDir, nodes: int | None, template_dirs: Sequence[Path]) -> Job:
    """Return what is submitted: the very files that were, or those for another node count."""
    job = read_job(run.path)
    now = job.bundle.sha256()
    if changed := [name for name, sha in run.record().sha256.items() if now.get(name) != sha]:
        raise RunError(
            f"{run.path / changed[0]} is not as it was submitted: submit it as a new run"
        )
    check_here(job)
    return job if nodes in (None, job.nodes) else resize(run, job, nodes, template_dirs)


def _job_ahead(run: RunDir) -> str:
    """Return the job to wait for: the last one of the run ahead, if that run still goes on."""
    record = run.record()
    if not record.after:
        return ""
    ahead = run.beside(record.after)
    status = run_status(ahead)
    if status.state == "COMPLETED":
        return ""
    if status.final or record.scheduler == "local":
        raise RunError(f"{run.name} continues {ahead.name}, which is {status.state}")
    return ahead.record().jobs[record.phases[-1]]


def _making_room(run: RunDir, record: Record) -> RunDir | None:
    """Return the run of its sweep whose end makes room for it, unless that has ended."""
    if not record.behind:
        return None
    behind = run.beside(record.behind)
    try:
        return None if run_status(behind).final else behind
    except RunError:  # deleted since
        return None


def _begin_again(need: Need, run: RunDir, status: RunStatus) -> None:
    """Make its record that of a run not yet submitted; the count of its attempts continues."""
    job, record = need.job, run.record()
    before = {
        "nodes": record.nodes, "jobs": dict(record.jobs), "state": status.state,
        "reason": status.reason, "resumed": utc_now(),
    }  # fmt: skip
    again = replace(
        record,
        nodes=job.nodes,
        phases=need.phases or job.phases,
        jobs={},
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
