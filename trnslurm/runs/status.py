"""Merges state files, squeue and sacct into one definite word per run, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trnslurm.errors import RunError, SlurmError
from trnslurm.runs.mending import mend_of
from trnslurm.runs.phase import (
    FINAL,
    STARTABLE,
    PhaseStatus,
    Seen,
    Wait,
    phase_status,
)
from trnslurm.runs.run import Attempt, Record, RunDir
from trnslurm.slurm.commands import Slurm, job_of

_LEFT_TIMEOUT_S = 5  # a run that has completed is not worth a long wait


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
    after: str
    """The run whose end this one waits for, or waited for; empty: none."""
    then: str
    """The run that waits for the end of this one."""
    precompile: Mapping[str, Any]
    """As in run.json: the key of its graphs, and why there was no precompile phase."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last line of metrics.jsonl."""
    mend: str = ""
    """The command that mends what Slurm does not mend by itself."""
    attempts: tuple[Attempt, ...] = ()
    """Every attempt of its last phase, before it was resumed too."""
    history: tuple[Mapping[str, Any], ...] = ()
    """As in run.json: what the run was each time before it was resumed."""

    @property
    def final(self) -> bool:
        return self.state in FINAL


def run_status(run: RunDir, *, leftovers: bool = False) -> RunStatus:
    """Return the status of one run; with `leftovers`, ask Slurm about one that completed too."""
    statuses, broken = statuses_of([run])
    if broken:
        raise broken[0]
    status = statuses[0]
    if leftovers and status.state == "COMPLETED" and _left_in_queue(run, run.record()):
        return replace(status, mend=f"trnslurm cancel {run.name}")
    return status


def statuses_of(runs: Sequence[RunDir]) -> tuple[list[RunStatus], list[RunError]]:
    """Return the status of many runs, with one squeue call per cluster, and the damaged ones."""
    records: list[tuple[RunDir, Record]] = []
    broken = []
    for run in runs:
        try:
            records.append((run, run.record()))
        except RunError as error:
            broken.append(error)
    seen = _ask_controllers(_with_those_ahead(records))
    return [_status(run, record, seen.get(record.bin_dir)) for run, record in records], broken


def _with_those_ahead(records: Sequence[tuple[RunDir, Record]]) -> list[tuple[RunDir, Record]]:
    """Return the runs, and those that they wait for."""
    found = list(records)
    for run, record in found:  # what is added is looked at too
        ahead = _run_ahead(run, record)
        if ahead and ahead not in found:
            found.append(ahead)
    return found


def _run_ahead(run: RunDir, record: Record) -> tuple[RunDir, Record] | None:
    """Return the run that a run waits for: None once it has begun, or if that run is deleted."""
    if not record.after or any(run.attempts_since(record, p) for p in record.phases):
        return None
    ahead = run.beside(record.after)
    try:
        return ahead, ahead.record()
    except RunError:
        return None


def _ask_controllers(records: Sequence[tuple[RunDir, Record]]) -> dict[str | None, Seen]:
    on_slurm = [(run, r) for run, r in records if r.scheduler == "slurm" and r.jobs]
    seen = {}
    for bin_dir in {record.bin_dir for _, record in on_slurm}:
        ours = [(run, record) for run, record in on_slurm if record.bin_dir == bin_dir]
        seen[bin_dir] = _ask_controller(Slurm(bin_dir), ours)
    return seen


def _ask_controller(slurm: Slurm, records: Sequence[tuple[RunDir, Record]]) -> Seen:
    unsettled = [(run, record) for run, record in records if not is_complete(run, record)]
    if not unsettled:
        return Seen({}, {})
    try:
        queue = slurm.queue(sorted({record.user for _, record in unsettled}))
    except SlurmError as error:
        return Seen({}, {}, silent=str(error))
    forgotten = [
        job
        for run, record in unsettled
        for job in record.jobs.values()
        if not job_of(queue, job, run.path)
    ]
    return Seen(queue, slurm.accounting(forgotten))


def _left_in_queue(run: RunDir, record: Record) -> bool:
    """Whether Slurm holds a job of a run that has completed, as after a restart of its own."""
    if record.scheduler != "slurm":
        return False
    try:
        queue = Slurm(record.bin_dir).queue([record.user], timeout_s=_LEFT_TIMEOUT_S)
    except SlurmError:
        return False
    found = (job_of(queue, job, run.path) for job in record.jobs.values())
    return any(entry.state in STARTABLE for entry in found if entry)


def is_complete(run: RunDir, record: Record) -> bool:
    """Whether the state files alone have the last word: whatever Slurm makes of the job now."""
    last = run.attempts_since(record, record.phases[-1])
    return bool(last) and last[-1].state == "COMPLETED"


def _status(run: RunDir, record: Record, seen: Seen | None) -> RunStatus:
    seen = None if is_complete(run, record) else seen
    found = _run_ahead(run, record)
    ahead = _status(*found, seen) if found else None
    phases: list[PhaseStatus] = []
    for phase in record.phases:
        wait = Wait(
            _waits_for(record, phases),
            _never_started(record, phases, ahead),
            "" if phases else _dropped(record),
        )
        phases.append(phase_status(run, record, phase, seen, wait))
    state, reason = _overall(record, phases)
    if state == "RUNNING" and run.cancelled_file.exists():
        reason = reason or "cancelled: it saves a checkpoint and ends"
    in_vain = ahead is not None and ahead.final and ahead.state != "COMPLETED"
    mend = mend_of(run, record, state, phases, ahead.mend if ahead and in_vain else "")
    return RunStatus(
        run=run.name, path=str(run.path), state=state, reason=reason, recipe=record.recipe,
        preset=record.preset, cluster=record.cluster, nodes=record.nodes,
        created=record.created, phases=tuple(phases), after=record.after, then=record.then,
        precompile=record.precompile, metrics=run.last_metrics(),
        mend=mend, attempts=tuple(run.attempts(record.phases[-1])), history=record.history,
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


def _waits_for(record: Record, before: Sequence[PhaseStatus]) -> str:
    if before:
        return "the precompile phase" if record.scheduler == "local" else "the precompile job"
    return record.after or _compiling(record)


def _compiling(record: Record) -> str:
    """Return the job of another run that compiles what this one needs."""
    job = record.precompile.get("waits_for")
    return f"job {job}, which compiles its graphs" if job else ""


def _dropped(record: Record) -> str:
    compiling = _compiling(record)
    return f"never started: {compiling}, did not succeed" if compiling else ""


def _never_started(record: Record, before: Sequence[PhaseStatus], ahead: RunStatus | None) -> str:
    """Why a phase without any attempt will not have one; empty if it still may."""
    if record.refused:
        return "never submitted"
    if ahead and ahead.final and ahead.state != "COMPLETED":
        return f"never started: {ahead.run} is {ahead.state}"
    if any(p.final and p.state != "COMPLETED" for p in before):
        return "never started: the phase before it did not complete"
    return ""
