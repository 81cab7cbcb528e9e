"""Cancel runs: a running training saves a checkpoint first, all other jobs end at once."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence

from trnslurm.contract.states import State
from trnslurm.errors import RunError, SlurmError, SubmitError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import refuse_foreign, refuse_writable, this_user
from trnslurm.records.run import Record, RunDir
from trnslurm.rundir import read_file, utc_time, write_json
from trnslurm.runs.by_hand import refuse_by_hand
from trnslurm.runs.status import RunStatus, is_complete, statuses_of
from trnslurm.slurm.commands import QueueEntry, Slurm, find_job
from trnslurm.slurm.states import RUNNING

_TRAIN = "train"
# The program that handles the signal; scripts of earlier versions handled it themselves.
_SAVES = re.compile(rb"^(exec .*trnslurm\.node\.attempt|\s*trap .*\bUSR1)\b", re.MULTILINE)


class Cancelled(Frozen, kw_only=False):
    """A run that was cancelled."""

    run: RunDir
    saves: bool
    """It saves a checkpoint first, and then ends."""


def cancel(run: RunDir, *, now: bool = False) -> list[Cancelled]:
    """Cancel every phase of a run, and the runs that wait for it.

    A training that runs on Slurm saves a checkpoint and ends, unless it has to end `now`.
    """
    return cancel_all([run], now=now)


def cancel_all(runs: Sequence[RunDir], *, now: bool = False) -> list[Cancelled]:
    """Cancel runs as `cancel` does, with a few commands for all of them."""
    records = []
    for run in runs:
        refuse_foreign(run.path, "cancel")
        records.append(record := run.record())
        jobs = " ".join(record.slurm_jobs.values())
        refuse_by_hand(run, record, f"scancel {jobs}" if jobs else "end its script where it runs")
        if record.local and record.host != socket.gethostname():
            raise SubmitError(f"{run.name} runs on {record.host}: cancel it there")
    every = {run: run.record() for each in runs for run in _with_waiting(each)}
    # Slurm forgets the cancelling of a job that never started; this file also stops new attempts.
    for run, record in every.items():
        if is_complete(run, record):
            continue  # its leftover jobs are cancelled; the run stays completed
        try:
            write_json(run.cancelled_file, {"by": this_user(), "time": utc_time()})
        except OSError:
            pass  # cancel the job even if the disk is full
    saving: set[RunDir] = set()
    try:
        for run, record in [*zip(runs, records, strict=True)][::-1]:  # so that none starts
            if record.local:
                from trnslurm.submit import on_this_machine

                on_this_machine.stop(run)
        for bin_dir in {record.bin_dir for record in every.values() if not record.local}:
            if not (slurm := Slurm(bin_dir)).vanished:
                here = {run: r for run, r in every.items() if r.bin_dir == bin_dir and not r.local}
                saving |= _cancel_on_slurm(here, slurm, now=now)
    except SlurmError:
        for run in every:
            run.cancelled_file.unlink(missing_ok=True)
        raise
    return [Cancelled(run, saves=run in saving) for run in every]


def _with_waiting(run: RunDir) -> list[RunDir]:
    """Return a run, and all runs that wait for it, directly or not."""
    runs, last = [run], run.record()
    while last.then:
        waiting = runs[-1].sibling(last.then)
        try:
            last = waiting.record()
            refuse_foreign(waiting.path, "cancel")
        except RunError:  # deleted or damaged: cancel the others nevertheless
            break
        runs.append(waiting)
    return runs


def cancel_unless_ended(
    runs: Sequence[RunDir], *, now: bool = False
) -> tuple[list[RunStatus], list[Cancelled]]:
    """Cancel runs that may still have jobs; return the status of the others, and the cancelled."""
    statuses, broken = statuses_of(runs, leftovers=True)
    if broken:
        raise RunError(f"{broken[0]}{''.join(map(jobs_to_cancel, runs))}")
    # A LOST run may still run, and so may an early phase of a refused run.
    ended = [
        status
        for status in statuses
        if status.final
        and status.state is not State.LOST
        and all(phase.final for phase in status.phases)
        and status.mend != f"trnslurm cancel {status.run}"
    ]
    over = {status.path for status in ended}
    left = [run for run in runs if str(run.path) not in over]
    return ended, cancel_all(left, now=now) if left else []


def jobs_to_cancel(run: RunDir) -> str:
    """Return the command that cancels the jobs of a run whose record cannot be read."""
    try:
        refuse_foreign(run.path, "cancel")
        refuse_writable(run.path)
        jobs = Slurm(None).jobs_in([str(run.path)], this_user())
    except (RunError, SlurmError):
        return ""
    return f": scancel {' '.join(jobs)}" if jobs else ""


def _cancel_on_slurm(records: Mapping[RunDir, Record], slurm: Slurm, *, now: bool) -> set[RunDir]:
    """Cancel the jobs of runs; return the runs that save first."""
    users = sorted({record.user for record in records.values()})
    known = [job for record in records.values() for job in record.jobs.values()]
    queue = slurm.queue(users, known=known)
    training = {} if now else {run: _training(run, queue) for run in records}
    saving = {run: job for run, job in training.items() if job}
    # The submission of these was interrupted.
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
    """Return the job of a running training that saves a checkpoint at the signal; empty: none.

    The batch script must handle the signal; it would kill a script that does not.
    """
    record = run.record()
    job = record.jobs.get(_TRAIN, "")
    last = run.attempts_since(record, _TRAIN)[-1:]
    if not job or not last or (last[0].state, last[0].job_id) != (State.RUNNING, job):
        return ""
    # A custom script that reported nothing does not check for a stop, or has nothing to save.
    told = run.last_metrics().get("attempt") == last[0].attempt or run.newest_step()
    if run.project_file.exists() and not told:
        return ""
    try:
        saves = _SAVES.search(read_file(run.script(_TRAIN)))
    except OSError:
        return ""
    entry = find_job(queue, job, run.path)
    return job if saves and entry and entry.state == RUNNING else ""
