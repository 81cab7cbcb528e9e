"""Merges state files, squeue and sacct into one definite word per run, with the reason."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trnslurm.errors import RunError, SlurmError
from trnslurm.run import Attempt, Record, RunDir
from trnslurm.slurm import QueueEntry, Slurm

FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "STOPPED", "LOST",
}  # fmt: skip
_STALE_S = 120  # four missed heartbeats
_WRITTEN = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "STOPPED"}
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_HOLD"}
_ALIVE = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"}
_SLURM_ENDED = {
    "BOOT_FAIL": ("FAILED", "its nodes failed to boot"),
    "CANCELLED": ("CANCELLED", ""),
    "COMPLETED": ("COMPLETED", ""),
    "DEADLINE": ("TIMEOUT", "its deadline passed"),
    "FAILED": ("FAILED", ""),
    "NODE_FAIL": ("NODE_FAIL", "a node failed"),
    "OUT_OF_MEMORY": ("FAILED", "out of host memory"),
    "PREEMPTED": ("PREEMPTED", ""),
    "TIMEOUT": ("TIMEOUT", "time limit"),
}


@dataclass(frozen=True, kw_only=True)
class PhaseStatus:
    """Where one phase of a run stands."""

    phase: str
    state: str
    reason: str = ""
    job_id: str = ""
    attempt: int = 0
    hosts: str = ""
    started: str = ""
    ended: str = ""

    @property
    def final(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run stands, in one word, and what it has done so far."""

    run: str
    path: str
    state: str
    reason: str
    recipe: str
    preset: str | None
    cluster: str
    nodes: int
    created: str
    phases: tuple[PhaseStatus, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last line of metrics.jsonl."""

    @property
    def final(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True)
class _Seen:
    """What the controller, asked once for all runs, had to say."""

    queue: Mapping[str, QueueEntry]
    accounting: Mapping[str, QueueEntry]
    silent: str = ""
    """Why the controller said nothing."""


def run_status(run: RunDir) -> RunStatus:
    """Return the status of one run."""
    statuses, broken = statuses_of([run])
    if broken:
        raise broken[0]
    return statuses[0]


def statuses_of(runs: Sequence[RunDir]) -> tuple[list[RunStatus], list[RunError]]:
    """Return the status of many runs, with one squeue call per cluster, and the damaged ones."""
    records: list[tuple[RunDir, Record]] = []
    broken = []
    for run in runs:
        try:
            records.append((run, run.record()))
        except RunError as error:
            broken.append(error)
    seen = _ask_controllers(records)
    return [_status(run, record, seen.get(record.bin_dir)) for run, record in records], broken


def _ask_controllers(records: Sequence[tuple[RunDir, Record]]) -> dict[str | None, _Seen]:
    on_slurm = [(run, r) for run, r in records if r.scheduler == "slurm" and r.jobs]
    seen = {}
    for bin_dir in {record.bin_dir for _, record in on_slurm}:
        ours = [(run, record) for run, record in on_slurm if record.bin_dir == bin_dir]
        seen[bin_dir] = _ask_controller(Slurm(bin_dir), ours)
    return seen


def _ask_controller(slurm: Slurm, records: Sequence[tuple[RunDir, Record]]) -> _Seen:
    unsettled = [(run, record) for run, record in records if not _settled(run, record)]
    if not unsettled:
        return _Seen({}, {})
    try:
        queue = slurm.queue(sorted({record.user for _, record in unsettled}))
    except SlurmError as error:
        return _Seen({}, {}, silent=str(error))
    forgotten = [j for _, r in unsettled for j in r.jobs.values() if j not in queue]
    return _Seen(queue, slurm.accounting(forgotten))


def _settled(run: RunDir, record: Record) -> bool:
    """Whether the state files alone have the last word."""
    last = run.attempts(record.phases[-1])
    return bool(last) and last[-1].state == "COMPLETED"


def _status(run: RunDir, record: Record, seen: _Seen | None) -> RunStatus:
    phases: list[PhaseStatus] = []
    for phase in record.phases:
        phases.append(_phase_status(run, record, phase, seen, before=phases))
    state, reason = _overall(record, phases)
    return RunStatus(
        run=run.name, path=str(run.path), state=state, reason=reason, recipe=record.recipe,
        preset=record.preset, cluster=record.cluster, nodes=record.nodes,
        created=record.created, phases=tuple(phases), metrics=run.last_metrics(),
    )  # fmt: skip


def _overall(record: Record, phases: Sequence[PhaseStatus]) -> tuple[str, str]:
    if record.refused:
        return "FAILED", f"refused at submission: {record.refused}"
    for phase in phases[:-1]:
        later = phases[phases.index(phase) + 1 :]
        if phase.state == "COMPLETED" or any(p.attempt for p in later):
            continue
        if phase.state == "RUNNING":
            return "PRECOMPILING", phase.reason
        if phase.reason:
            return phase.state, f"{phase.phase}: {phase.reason}"
        return phase.state, f"in {phase.phase}" if phase.final else ""
    return phases[-1].state, phases[-1].reason


def _phase_status(
    run: RunDir, record: Record, phase: str, seen: _Seen | None, *, before: Sequence[PhaseStatus]
) -> PhaseStatus:
    attempts = run.attempts(phase)
    last = attempts[-1] if attempts else None
    job_id = record.jobs.get(phase, "")
    never = _never_started(record, before) if last is None else ""
    if record.scheduler == "local":
        state, reason = _local_state(run, record, phase, last, never)
    else:
        state, reason = _slurm_state(run, job_id, last, never, seen or _Seen({}, {}))
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


def _never_started(record: Record, before: Sequence[PhaseStatus]) -> str:
    """Why a phase without any attempt will not have one; empty if it still may."""
    if record.refused:
        return "never submitted"
    if any(p.final and p.state != "COMPLETED" for p in before):
        return "never started: the phase before it did not complete"
    return ""


def _slurm_state(
    run: RunDir, job_id: str, last: Attempt | None, never: str, seen: _Seen
) -> tuple[str, str]:
    entry = seen.queue.get(job_id) if job_id else None
    if entry is None:
        return ("CANCELLED", never) if never else _forgotten(run, job_id, last, seen)
    if never and entry.state in ("CANCELLED", "FAILED"):
        return "CANCELLED", never
    if entry.state == "CONFIGURING":
        return "CONFIGURING", "its nodes are booting"
    if entry.state in _QUEUED:
        return _queued(entry, last)
    if entry.state in _ALIVE:
        if last and last.state == "REQUEUED":
            return "REQUEUED", last.reason
        # On TERM the script writes CANCELLED first and then asks the controller what it was: only a
        # job that has ended in the queue too, or a cancel of ours, makes that word final.
        said = last.state if last else ""
        ended = said in _WRITTEN and (said != "CANCELLED" or run.cancelled_file.exists())
        if last and ended and entry.state == "COMPLETING":
            return said, last.reason
        return "RUNNING", "suspended" if entry.state == "SUSPENDED" else ""
    return _ended(entry, last)


def _queued(entry: QueueEntry, last: Attempt | None) -> tuple[str, str]:
    if entry.reason.startswith("DependencyNeverSatisfied"):
        return "FAILED", entry.why
    held = "Held" in entry.reason or "held" in entry.reason or entry.state.endswith("HOLD")
    if held:
        return "HELD", entry.why
    if last is not None:
        return "REQUEUED", entry.why
    return "PENDING", entry.why


def _ended(entry: QueueEntry, last: Attempt | None) -> tuple[str, str]:
    state, reason = _SLURM_ENDED.get(entry.state, ("FAILED", entry.state.lower()))
    if last and entry.reason == "JobLaunchFailure":
        reason = "its batch script was killed"  # it had been launched: it wrote its state file
    # The script's own word is more exact than Slurm's, where the two agree that it ended.
    if last and last.state in _WRITTEN and (last.state == state or state == "FAILED"):
        return last.state, last.reason
    # squeue keeps the reason for which a job once waited.
    return state, reason or ("" if state in ("CANCELLED", "COMPLETED") else entry.why)


def _forgotten(run: RunDir, job_id: str, last: Attempt | None, seen: _Seen) -> tuple[str, str]:
    if last and last.state in _WRITTEN:
        return last.state, last.reason
    if run.cancelled_file.exists():
        return "CANCELLED", ""
    if job_id in seen.accounting:
        return _ended(seen.accounting[job_id], last)
    age = run.heartbeat_age_s()
    # A silent controller proves nothing; only a script that should show life and does not, does.
    stale = last is not None and last.state == "RUNNING" and (age or 0) >= _STALE_S
    if seen.silent and not stale:
        word = "PENDING" if last is None else "REQUEUED" if last.state == "REQUEUED" else "RUNNING"
        return word, f"as last seen; {seen.silent}"
    if last is None:
        return (
            "LOST",
            "it never started, and Slurm has no record of it" if job_id else "not submitted",
        )
    return "LOST", _since(age)


def _local_state(
    run: RunDir, record: Record, phase: str, last: Attempt | None, never: str
) -> tuple[str, str]:
    if last and last.state in _WRITTEN:
        return last.state, last.reason
    if never:
        return "CANCELLED", never
    if record.host != socket.gethostname():
        age = run.heartbeat_age_s()
        fresh = age is not None and age < _STALE_S
        return ("RUNNING", f"on {record.host}") if fresh else ("LOST", _since(age))
    if local_job_alive(record):
        if last:
            return "RUNNING", ""
        first = phase == record.phases[0]
        return "PENDING", "starting" if first else "waiting for the precompile phase"
    if run.cancelled_file.exists():
        return "CANCELLED", ""
    return "LOST", _since(run.heartbeat_age_s())


def local_job_alive(record: Record) -> bool:
    """Whether the local job's controller still runs; pids are used again, start times are not."""
    pid, start = local_job(record)
    return pid > 0 and process_start(pid) == start


def local_job(record: Record) -> tuple[int, str]:
    """Return pid and start time of the local job's controller."""
    pid, _, start = record.jobs.get("local", "").partition("@")
    return (int(pid), start) if pid.isdigit() and start else (0, "")


def process_start(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, or an empty string."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _since(age: float | None) -> str:
    if age is None:
        return "it ended without a word, before its first heartbeat"
    then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))
    return f"no sign of life since {then}"
