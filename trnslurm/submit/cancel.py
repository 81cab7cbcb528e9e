"""Cancel runs: a running training saves a checkpoint first, all other jobs end at once."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from trnslurm.errors import RunError, SlurmError, SubmitError
from trnslurm.frozen import Frozen
from trnslurm.rundir import read_file, utc_time, write_json
from trnslurm.runs.foreign import refuse_foreign, refuse_writable, this_user
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, is_complete, run_status
from trnslurm.slurm.commands import QueueEntry, Slurm, find_job

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
    refuse_foreign(run.path, "cancel")
    record = run.record()
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise SubmitError(f"{run.name} runs on {record.host}: cancel it there")
    runs, last = [run], record
    while last.then:  # all runs that wait for it, directly or not
        waiting = runs[-1].sibling(last.then)
        try:
            last = waiting.record()
            refuse_foreign(waiting.path, "cancel")
        except RunError:  # deleted or damaged: cancel the others nevertheless
            break
        runs.append(waiting)
    # Slurm forgets the cancelling of a job that never started; this file also stops new attempts.
    for each in runs:
        if is_complete(each, each.record()):
            continue  # its leftover jobs are cancelled; the run stays completed
        try:
            write_json(each.cancelled_file, {"by": this_user(), "time": utc_time()})
        except OSError:
            pass  # cancel the job even if the disk is full
    try:
        if record.scheduler == "local":
            from trnslurm.submit import on_this_machine

            on_this_machine.stop(run)
            return [Cancelled(each, saves=False) for each in runs]
        slurm = Slurm(record.bin_dir)
        if slurm.vanished:
            return [Cancelled(each, saves=False) for each in runs]
        return _cancel_on_slurm(runs, slurm, now=now)
    except SlurmError:
        for each in runs:
            each.cancelled_file.unlink(missing_ok=True)
        raise


def cancel_unless_ended(run: RunDir, *, now: bool = False) -> tuple[RunStatus, list[Cancelled]]:
    """Cancel a run that may still have jobs; return its status before, and what was cancelled."""
    try:
        before = run_status(run, leftovers=True)
    except RunError as error:
        raise RunError(f"{error}{jobs_to_cancel(run)}") from None
    # A LOST run may still run, and so may an early phase of a refused run.
    settled = before.state != "LOST" and all(phase.final for phase in before.phases)
    settled = settled and before.mend != f"trnslurm cancel {run.name}"
    return before, [] if before.final and settled else cancel(run, now=now)


def jobs_to_cancel(run: RunDir) -> str:
    """Return the command that cancels the jobs of a run whose record cannot be read."""
    try:
        refuse_foreign(run.path, "cancel")
        refuse_writable(run.path)
        jobs = Slurm(None).jobs_in(str(run.path), this_user())
    except (RunError, SlurmError):
        return ""
    return f": scancel {' '.join(jobs)}" if jobs else ""


def _cancel_on_slurm(runs: list[RunDir], slurm: Slurm, *, now: bool) -> list[Cancelled]:
    records = [each.record() for each in runs]
    known_jobs = [job for record in records for job in record.jobs.values()]
    queue = slurm.queue(sorted({record.user for record in records}), known=known_jobs)
    training = {} if now else {each: _training(each, queue) for each in runs}
    saving = {job for job in training.values() if job}
    jobs: list[str] = []
    for each in runs:
        record = each.record()
        known = [*record.jobs.values()]
        if not set(record.phases) <= set(record.jobs):  # its submission was interrupted
            found = slurm.jobs_in(str(each.path), record.user)
            known += [job for job in found if job not in known]
        jobs += [job for job in known if job not in queue or find_job(queue, job, each.path)]
    # Last phase first: the end of an earlier phase could release it.
    if jobs := [job for job in jobs[::-1] if job not in saving]:
        slurm.cancel(jobs)
    for each, job in training.items():
        if job:
            last = each.attempts(_TRAIN)[-1]
            slurm.ask_to_stop(job, last.hosts.partition(",")[0], last.pid)
    return [Cancelled(each, saves=bool(training.get(each))) for each in runs]


def _training(run: RunDir, queue: Mapping[str, QueueEntry]) -> str:
    """Return the job of a running training that saves a checkpoint at the signal; empty: none.

    The batch script must handle the signal; it would kill a script that does not.
    """
    record = run.record()
    job = record.jobs.get(_TRAIN, "")
    last = run.attempts_since(record, _TRAIN)[-1:]
    if not job or not last or (last[0].state, last[0].job_id) != ("RUNNING", job):
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
    return job if saves and entry and entry.state == "RUNNING" else ""
