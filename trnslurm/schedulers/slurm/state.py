"""The state of a phase on Slurm, from its state files, the queue and accounting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_file
from trnslurm.contract.states import State
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.foreign import printable
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import Seen, Wait, by_command
from trnslurm.schedulers.signs import STALE_S, died, silent_since
from trnslurm.slurm import states
from trnslurm.slurm.commands import QueueEntry, find_job

_MOST_LOG = 1 << 20
LAUNCH_HELD = "held by Slurm, because its launch failed"
NEVER_AGAIN = "too few nodes satisfy the job's constraints, and Slurm has stopped trying"


class SlurmSeen(Seen, Frozen, kw_only=False):
    """The controller's answer about all runs."""

    queue: Mapping[str, QueueEntry] = field(default_factory=dict)
    accounting: Mapping[str, QueueEntry] = field(default_factory=dict)
    silent: str = ""
    """Why the controller did not answer."""
    vanished: str = ""
    """Why the controller no longer exists."""

    def may_run(self, job: str | None) -> bool:
        entry = self.queue.get(job or "")
        return bool(self.silent) or (entry is not None and not entry.ended)

    def state(
        self, run: RunDir, record: Record, phase: str, last: Attempt | None, wait: Wait
    ) -> tuple[State, str]:
        job_id = record.jobs.get(phase, "")
        entry = find_job(self.queue, job_id, run.path)
        never = wait.never if last is None else ""
        if entry is None:
            return (State.CANCELLED, never) if never else _forgotten(run, job_id, last, wait, self)
        if never and entry.state in (states.CANCELLED, states.FAILED):
            return State.CANCELLED, never
        if wait.dropped and last is None and entry.state == states.CANCELLED:
            return State.CANCELLED, "" if run.cancelled_file.exists() else wait.dropped
        if entry.state == states.CONFIGURING:
            return State.CONFIGURING, "its nodes are booting"
        if entry.startable:
            return _queued(run, entry, last, wait)
        if entry.alive:
            return _alive(run, job_id, entry, last)
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
        soon = "it will start again within minutes" if entry.reason.startswith("BeginTime") else ""
        return State.REQUEUED, "; ".join(filter(None, [cause, soon or entry.why, excluding]))
    return State.PENDING, entry.why


def _alive(run: RunDir, job_id: str, entry: QueueEntry, last: Attempt | None) -> tuple[State, str]:
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


def _ended(run: RunDir, entry: QueueEntry, last: Attempt | None) -> tuple[State, str]:
    state, reason = states.ENDED.get(entry.state, (State.FAILED, entry.state.lower()))
    if state is State.COMPLETED and (last is None or last.state is State.REQUEUED):
        return State.FAILED, _never_began(run, entry, last)
    if last and entry.reason == "JobLaunchFailure":
        reason = "its batch script was killed"  # a state file proves that the script had started
    ours = run.cancelled_file.exists()
    by = by_command("scancel", entry.ended_by) if state is State.CANCELLED and not ours else ""
    # If both say that the job ended, the script's state is more precise than Slurm's. Only it
    # knows that everything is saved or done.
    exact = last and last.state in (State.COMPLETED, State.STOPPED, state)
    if last and last.state.written and (exact or state is State.FAILED):
        return last.state, last.reason or (by if last.state == state else "")
    # squeue still shows why the job once waited, which explains neither a cancel nor a completion.
    return state, reason or by or ("" if state in (State.CANCELLED, State.COMPLETED) else entry.why)


def _never_began(run: RunDir, entry: QueueEntry, last: Attempt | None) -> str:
    """Return why a job that Slurm calls COMPLETED has no attempt, although its script starts one.

    If slurmd cannot launch the batch script, it reports an error with the exit code 0. slurmctld
    then drains the node, and the job becomes COMPLETED (_slurm_rpc_complete_batch_script in
    src/slurmctld/proc_req.c; seen on 22.05, where task/affinity had failed).
    """
    again = " again" if last else ""
    why = f" ({entry.why})" if entry.why else ""
    if said := _of_slurmstepd(run):
        return f"its batch script never started{again}: {said}"
    nodes = entry.nodes if entry.nodes.strip("()").lower() not in ("", "null", "n/a") else ""
    node = nodes or "its first node"
    return (
        f"its batch script never started{again}, although Slurm calls the job COMPLETED{why}: "
        f"see `scontrol show node {nodes or 'NODE'}` and slurmd's log on {node}"
    )


def _of_slurmstepd(run: RunDir) -> str:
    """Return slurmstepd's first error in the newest log of a batch script; empty if none."""
    logs = run.batch_logs("train")
    with suppress(OSError):
        text = read_file(logs[-1], _MOST_LOG).decode(errors="replace") if logs else ""
        found = re.search(r"(?m)^(slurmstepd-?\S*): error: (.*)$", text)
        return printable(f"{found[1]}: {found[2]}") if found else ""
    return ""


def _forgotten(
    run: RunDir, job_id: str, last: Attempt | None, wait: Wait, seen: SlurmSeen
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
    stale = last is not None and last.state is State.RUNNING and (age or 0) >= STALE_S
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
    return State.LOST, silent_since(age)
