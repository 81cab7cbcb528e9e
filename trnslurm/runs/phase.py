"""Determines the state of one phase of a run from its state files, the queue and accounting."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.states import State
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.foreign import printable
from trnslurm.records.run import Record, RunDir
from trnslurm.rundir import read_json
from trnslurm.slurm import states
from trnslurm.slurm.commands import QueueEntry, find_job

_STALE_S = 120  # four missed heartbeats
BY_SCANCEL = "by scancel"
"""Begins the reason of a run that trnslurm did not cancel."""
LAUNCH_HELD = "held by Slurm, as its launch failed"
NEVER_AGAIN = "too few nodes satisfy the job's constraints, and Slurm has stopped trying"


class PhaseStatus(Frozen):
    """The state of one phase of a run, and why."""

    phase: str
    state: State
    reason: str = ""
    job_id: str = ""
    attempt: int = 0
    hosts: str = ""
    started: str = ""
    ended: str = ""

    @property
    def final(self) -> bool:
        return self.state.final


def by_scancel(user: str) -> str:
    """Return the reason of a run that a user has cancelled by scancel; the user may be unknown."""
    return f"{BY_SCANCEL}{f' of {user}' if user else ''}, not by trnslurm cancel"


def held_by_slurm(status: PhaseStatus) -> bool:
    """Check whether Slurm itself holds a phase's job, so that the job starts only by command."""
    by_slurm = status.reason == LAUNCH_HELD or status.reason.startswith(NEVER_AGAIN)
    return status.state is State.HELD and by_slurm


class Wait(Frozen, kw_only=False):
    """What a phase waits for before its first attempt."""

    what: str
    """The precompile job, or another run; empty if the phase waits for nothing."""
    never: str
    """Why the phase will never start; empty if it may still start."""
    dropped: str = ""
    """Why Slurm may have cancelled the job before its start: it waits for another run's job."""


class Seen(Frozen, kw_only=False):
    """The controller's answer, one for all runs."""

    queue: Mapping[str, QueueEntry]
    accounting: Mapping[str, QueueEntry]
    silent: str = ""
    """Why the controller did not answer."""
    vanished: str = ""
    """Why there is no controller any more."""

    def may_run(self, job: str | None) -> bool:
        """Check whether a job has not ended, as far as the controller knows."""
        entry = self.queue.get(job or "")
        return bool(self.silent) or (entry is not None and not entry.ended)


def phase_status(
    run: RunDir, record: Record, phase: str, seen: Seen | None, wait: Wait
) -> PhaseStatus:
    """Return the status of a phase, given the controller's answer."""
    last = run.newest_attempt(record, phase)
    job_id = record.jobs.get(phase, "")
    if record.local:
        state, reason = _local_state(run, record, last, wait)
    else:
        state, reason = _slurm_state(run, job_id, last, wait, seen or Seen({}, {}))
    if state is State.FAILED and last:
        unclear = reason.startswith("exit code")
        unfit = _unfit_node(run, last) if unclear else ""
        problem = _compile_problem(run, last)
        if not unclear:
            problem = problem.replace("its error is above", reason)
        reason = unfit or problem or reason
    return PhaseStatus(
        phase=phase,
        state=state,
        reason=reason,
        job_id=job_id,
        attempt=last.attempt if last else 0,
        hosts=last.hosts if last else "",
        started=last.started if last else "",
        ended=(last.ended or "") if last else "",
    )


def _unfit_node(run: RunDir, last: Attempt) -> str:
    """Return the first problem that an attempt's preflight found on a node."""
    found = run.preflight(last.phase, last.attempt)
    problems = [f"{node.host}: {node.problems[0]}" for node in found if node.problems]
    if not problems:
        return ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"preflight: {problems[0]}{more}"


def _compile_problem(run: RunDir, last: Attempt) -> str:
    """Return the compile problem of the first node that has one."""
    for file in run.graphs_files(last.attempt) if last.phase == "precompile" else ():
        result = read_json(file)
        if problem := result.get("problem"):
            return printable(f"{result.get('host', 'a node')}: {problem}")
    return ""


def _slurm_state(
    run: RunDir, job_id: str, last: Attempt | None, wait: Wait, seen: Seen
) -> tuple[State, str]:
    entry = find_job(seen.queue, job_id, run.path)
    never = wait.never if last is None else ""
    if entry is None:
        return (State.CANCELLED, never) if never else _forgotten(run, job_id, last, wait, seen)
    if never and entry.state in (states.CANCELLED, states.FAILED):
        return State.CANCELLED, never
    if wait.dropped and last is None and entry.state == states.CANCELLED:
        return State.CANCELLED, "" if run.cancelled_file.exists() else wait.dropped
    if entry.state == states.CONFIGURING:
        return State.CONFIGURING, "its nodes are booting"
    if entry.startable:
        return _queued(run, entry, last, wait)
    if entry.alive:
        if last and last.state is State.REQUEUED:
            return State.REQUEUED, last.reason
        # On TERM the script first writes CANCELLED and then asks the controller for the cause. So
        # CANCELLED is final only if the job has left the queue or `trnslurm cancel` was called.
        written = last.state if last and last.state.written else None
        if written is State.CANCELLED and not run.cancelled_file.exists():
            written = None
        if last and written and entry.state == states.COMPLETING:
            return written, last.reason
        if entry.state == states.COMPLETING:
            why = last.reason if last else ""
            return State.RUNNING, f"it is ending; {why}" if why else "it is ending"
        holder, step, _ = job_id.partition(".")
        inside = f"in job {holder}" if step else ""
        suspended = "suspended" if entry.state == states.SUSPENDED else ""
        return State.RUNNING, ", ".join(filter(None, [inside, suspended]))
    return _ended(run, entry, last)


def _queued(run: RunDir, entry: QueueEntry, last: Attempt | None, wait: Wait) -> tuple[State, str]:
    if entry.reason.startswith("DependencyNeverSatisfied"):
        return State.FAILED, f"{wait.what} failed, so it will never start"
    if entry.reason.startswith("Dependency"):
        return State.PENDING, f"waiting for {wait.what}"
    held = "Held" in entry.reason or "held" in entry.reason or entry.state.endswith("HOLD")
    if held:
        # Slurm's reason, with spaces or underscores: "launch failed requeued held".
        failed = entry.reason.replace("_", " ").startswith("launch failed")
        return State.HELD, LAUNCH_HELD if failed else entry.why
    # The nodes that the job excludes may be the ones that it lacks.
    hosts = brief(sorted(run.excluded()))
    excluding = f"excluding {hosts}" if hosts else ""
    if last is not None and entry.reason.startswith("BadConstraints"):
        # Slurm sets priority 0, which stays when there are nodes again (22.05).
        return State.HELD, "; ".join(filter(None, [NEVER_AGAIN, excluding]))
    if last is not None:
        cause = last.reason if last.state is State.REQUEUED else ""
        if last.under_way:  # Slurm requeued it
            cause = died(last)
        # Slurm waits for old credentials to expire before it starts a requeued job.
        soon = "it starts again within minutes" if entry.reason.startswith("BeginTime") else ""
        return State.REQUEUED, "; ".join(filter(None, [cause, soon or entry.why, excluding]))
    return State.PENDING, entry.why


def died(attempt: Attempt) -> str:
    """Return why an attempt that is over has no end state, in words."""
    first = attempt.hosts.partition(",")[0]
    return f"it ended without recording its state, as when {first or 'its first node'} fails"


def _ended(run: RunDir, entry: QueueEntry, last: Attempt | None) -> tuple[State, str]:
    state, reason = states.ENDED.get(entry.state, (State.FAILED, entry.state.lower()))
    if last and entry.reason == "JobLaunchFailure":
        reason = "its batch script was killed"  # a state file proves that the script had started
    ours = run.cancelled_file.exists()
    by = by_scancel(entry.ended_by) if state is State.CANCELLED and not ours else ""
    # The script's state is more exact than Slurm's if both say that the job ended. Only the script
    # knows that everything is saved, or done.
    exact = last and last.state in (State.COMPLETED, State.STOPPED, state)
    if last and last.state.written and (exact or state is State.FAILED):
        return last.state, last.reason or (by if last.state == state else "")
    # squeue still shows why the job once waited, which explains no cancel and no completion.
    return state, reason or by or ("" if state in (State.CANCELLED, State.COMPLETED) else entry.why)


def _forgotten(
    run: RunDir, job_id: str, last: Attempt | None, wait: Wait, seen: Seen
) -> tuple[State, str]:
    if last and last.state.written:
        return last.state, last.reason
    if run.cancelled_file.exists():
        return State.CANCELLED, ""
    if job_id in seen.accounting:
        return _ended(run, seen.accounting[job_id], last)
    if seen.vanished:
        return State.LOST, seen.vanished
    age = run.heartbeat_age_s()
    # Without the controller's answer, only a missing heartbeat proves that the job is gone.
    stale = last is not None and last.state is State.RUNNING and (age or 0) >= _STALE_S
    if seen.silent and not stale:
        known = State.PENDING if last is None else last.state
        state = known if known.queued else State.RUNNING
        return state, f"as last seen; {seen.silent}"
    if last is None and wait.dropped:
        return State.CANCELLED, wait.dropped
    if last is None:
        # Slurm forgets the tasks of an array that scancel ends before their start (22.05).
        after = ", as after scancel" if "_" in job_id else ""
        unknown = f"it never started, and Slurm has no record of it{after}"
        return State.LOST, unknown if job_id else "not submitted"
    return State.LOST, _since(age)


def _local_state(
    run: RunDir, record: Record, last: Attempt | None, wait: Wait
) -> tuple[State, str]:
    if last and last.state.written:
        return last.state, last.reason
    if last is None and wait.never:
        return State.CANCELLED, wait.never
    if (last is None or last.state is State.STARTING) and run.cancelled_file.exists():
        return State.CANCELLED, ""  # the script ends as soon as it sees cancelled.json
    if record.host != os.uname().nodename:
        age = run.heartbeat_age_s()
        fresh = age is not None and age < _STALE_S
        return (State.RUNNING, f"on {record.host}") if fresh else (State.LOST, _since(age))
    if record.local_job_alive:
        if last:
            return State.RUNNING, ""
        return State.PENDING, f"waiting for {wait.what}" if wait.what else "starting"
    if run.cancelled_file.exists():
        return State.CANCELLED, ""
    return State.LOST, _since(run.heartbeat_age_s())


def _since(age: float | None) -> str:
    if age is None:
        return "it ended before its first heartbeat, without recording its state"
    then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))
    return f"no sign of life since {then}"
