"""What the scheduler still has of a run: nothing may be left of it when it is submitted anew."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from trnslurm.errors import NotYetError, RunError
from trnslurm.runs.phase import JOB_ENDED, LAUNCH_HELD, STARTABLE, held_by_slurm, is_live
from trnslurm.runs.process import local_job_alive
from trnslurm.runs.run import Attempt, Record, RunDir
from trnslurm.runs.status import RunStatus
from trnslurm.slurm.commands import QueueEntry, Slurm, job_of

_ENDING_S = 60  # a job that is completing is gone after the site's KillWait and its epilogue
_POLL_S = 0.5
_SILENT_S = 65  # two heartbeats were missed


def refuse_living(run: RunDir, record: Record, status: RunStatus) -> None:
    """Refuse a run that goes on by itself, or may."""
    name = run.name
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise RunError(f"{name} runs on {record.host}: resume it there")
    if not status.final and run.cancelled_file.exists():
        raise NotYetError(f"{name} is being cancelled: resume it once it has ended")
    if status.state == "HELD" and any(map(held_by_slurm, status.phases)):
        return
    if not status.final:
        reason = f" ({status.reason})" if status.reason else ""
        raise NotYetError(
            f"{name} is {status.state}{reason}: let it go on, or `trnslurm cancel {name}` first"
        )
    _refuse_unheard_of(run, record, status)


def _refuse_unheard_of(run: RunDir, record: Record, status: RunStatus) -> None:
    """Refuse what Slurm has no record of while its script shows life, as on a node cut off."""
    last = [a for phase in record.phases for a in run.attempts_since(record, phase)][-1:]
    age_s = run.heartbeat_age_s()
    if record.scheduler == "local" or status.state != "LOST" or age_s is None:
        return
    if last and last[0].state == "RUNNING" and age_s < _SILENT_S:
        raise NotYetError(
            f"{run.name} is LOST, but its script showed life {age_s:.0f} s ago: "
            f"resume it in {_SILENT_S - age_s:.0f} s, if it has been silent until then"
        )


def end_leftovers(run: RunDir, record: Record) -> None:
    """Leave nothing of a run that has ended: cancel what only waits, refuse what runs."""
    if record.scheduler == "local":
        _await_local_end(run, record)
        return
    slurm = Slurm(record.bin_dir)
    deadline = time.monotonic() + _ENDING_S
    cancelled: set[str] = set()
    while left := jobs_left(run, record, slurm):
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


def jobs_left(run: RunDir, record: Record, slurm: Slurm) -> dict[str, QueueEntry]:
    """Return the jobs of a run that have not ended; a controller that is silent is an error."""
    ours = {*record.jobs.values(), *slurm.jobs_in(str(run.path), record.user)}
    queue = slurm.queue([record.user])
    found = {job: job_of(queue, job, run.path) for job in sorted(ours)}
    return {job: entry for job, entry in found.items() if entry and entry.state not in JOB_ENDED}


def held_after_launch(run: RunDir, record: Record, status: RunStatus) -> list[str]:
    """Return the jobs that only have to be released for the run to go on; empty: others must."""
    queue = Slurm(record.bin_dir).queue([record.user])
    held = [p.job_id for p in status.phases if (p.state, p.reason) == ("HELD", LAUNCH_HELD)]
    unfinished = [p.job_id for p in status.phases if p.state != "COMPLETED"]
    return held if all(is_live(job_of(queue, job, run.path)) for job in unfinished) else []


def _await_local_end(run: RunDir, record: Record) -> None:
    """Wait for the processes of a local run, which end a moment after its script's last word."""
    attempts = [a for phase in record.phases for a in run.attempts(phase)]
    deadline = time.monotonic() + _ENDING_S
    while local_job_alive(record) or _any_alive(run, attempts):
        if time.monotonic() > deadline:
            raise NotYetError(f"{run.name} still has processes here: trnslurm cancel {run.name}")
        time.sleep(_POLL_S)


def _any_alive(run: RunDir, attempts: Sequence[Attempt]) -> bool:
    """Whether a batch script of the run still runs here, known by its working directory."""
    for attempt in attempts:
        try:
            if attempt.pid and Path(f"/proc/{attempt.pid}/cwd").readlink() == run.path.resolve():
                return True
        except OSError:
            continue
    return False
