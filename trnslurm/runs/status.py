"""The state of a run in one definite word, why, and the command with which it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from trnslurm.errors import RunError, SlurmError
from trnslurm.frozen import Frozen
from trnslurm.rundir import PREPARE, read_json
from trnslurm.runs.phase import (
    FINAL,
    STARTABLE,
    WRITTEN,
    PhaseStatus,
    Seen,
    Wait,
    held_by_slurm,
    phase_status,
)
from trnslurm.runs.run import ERROR, Attempt, ReadOnce, Record, RunDir
from trnslurm.slurm.commands import Slurm, find_job

if TYPE_CHECKING:
    from trnslurm.node.triage.finding import Finding

_LEFT_TIMEOUT_S = 5  # a run that has completed is not worth a long wait
_STOPPED_SHORT = {"FAILED", "LOST", "NODE_FAIL", "PREEMPTED", "STOPPED", "TIMEOUT"}
STOP_AT = "train.stop_at"
_QUEUED = {"PENDING", "HELD", "REQUEUED"}


class RunStatus(Frozen):
    """The state of a run, and what it has done so far."""

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
    group: str
    """The sweep that it is a run of; empty: it stands alone."""
    values: Mapping[str, str]
    """What was set for this run of the sweep."""
    precompile: Mapping[str, Any]
    """As in run.json: the key of its graphs, and why there was no precompile phase."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The last line of metrics.jsonl."""
    mend: str = ""
    """The command with which the run continues; empty if it does by itself, or should not."""
    attempts: tuple[Attempt, ...] = ()
    """Every attempt of its last phase, before it was resumed too."""
    history: tuple[Mapping[str, Any], ...] = ()
    """As in run.json: what the run was before each resume."""
    note: str = ""
    """What a person wrote about it."""
    kept: bool = False
    """Whether a person said that it must not be removed."""

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
    """Return the status of many runs, with one squeue call per cluster, and the damaged ones.

    Their attempts are read before that call, and after it if they had not completed.
    """
    records: list[tuple[RunDir, Record]] = []
    broken = []
    for each in runs:
        try:
            records.append((ReadOnce(each.path), each.record()))
        except RunError as error:
            broken.append(error)
    asked = list(records)
    for run, record in asked:  # grows: what a run waits for decides where it stands
        ahead = _run_ahead(run, record)
        if ahead and ahead not in asked:
            asked.append(ahead)
    on_slurm = [(run, r) for run, r in asked if r.scheduler == "slurm" and r.jobs]
    seen = {
        bin_dir: _ask_controller(Slurm(bin_dir), [p for p in on_slurm if p[1].bin_dir == bin_dir])
        for bin_dir in {record.bin_dir for _, record in on_slurm}
    }
    now = [r if is_complete(*r) else (ReadOnce(r[0].path), r[1]) for r in records]
    return [_status(run, record, seen.get(record.bin_dir)) for run, record in now], broken


def is_complete(run: RunDir, record: Record) -> bool:
    """Check whether the state files have the last word, whatever Slurm makes of the job now."""
    last = run.attempts_since(record, record.phases[-1])
    return bool(last) and last[-1].state == "COMPLETED"


def _has_said_its_end(run: RunDir, record: Record, phase: str) -> bool:
    """Check whether the newest attempt wrote how it ended, which accounting does not change."""
    last = run.attempts_since(record, phase)
    return bool(last) and last[-1].state in WRITTEN


def choose_attempt(run: RunDir, *, phase: str | None, attempt: int | None) -> Attempt:
    """Return the attempt asked for: by default the newest of the last phase that began."""
    record = run.record()
    if phase is not None and phase not in record.phases:
        raise RunError(f"{run.name} has no phase {phase!r}; it has {', '.join(record.phases)}")
    for name in [phase] if phase else reversed(record.phases):
        attempts = run.attempts(name)
        found = [a for a in attempts if attempt in (None, a.attempt)]
        if found:
            return found[-1]
        if attempts:
            raise RunError(f"{run.name} has no attempt {attempt} of {name}, only {len(attempts)}")
    raise RunError(f"{run.name} has not begun: there is no attempt of {phase or 'any phase'} yet")


def why_it_failed(run: RunDir, status: RunStatus) -> Finding | None:
    """Return what triage finds in a run that failed, or that is requeued after a crash."""
    for phase in reversed(status.phases):
        if not phase.attempt:
            continue
        crashed = phase.state == "REQUEUED" and not run.was_stopped(phase.phase, phase.attempt)
        if phase.state in ("FAILED", "NODE_FAIL", "LOST") or crashed:
            from trnslurm.node.triage.finding import find_cause  # its patterns are for this only

            return find_cause(run.path, phase.phase, phase.attempt)
    return None


def _run_ahead(run: RunDir, record: Record) -> tuple[RunDir, Record] | None:
    """Return the run that a run waits for: None once it has begun, or if that run is deleted."""
    if not record.after or any(run.attempts_since(record, p) for p in record.phases):
        return None
    ahead = run.beside(record.after)
    try:
        return ahead, ahead.record()
    except RunError:
        return None


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
        for phase, job in record.jobs.items()
        if not find_job(queue, job, run.path) and not _has_said_its_end(run, record, phase)
    ]
    return Seen(queue, slurm.accounting(forgotten))


def _left_in_queue(run: RunDir, record: Record) -> bool:
    """Check whether Slurm holds a job of a completed run, as after a restart of its own."""
    if record.scheduler != "slurm":
        return False
    try:
        queue = Slurm(record.bin_dir).queue([record.user], timeout_s=_LEFT_TIMEOUT_S)
    except SlurmError:
        return False
    found = (find_job(queue, job, run.path) for job in record.jobs.values())
    return any(entry.state in STARTABLE for entry in found if entry)


def _status(run: RunDir, record: Record, seen: Seen | None) -> RunStatus:
    seen = None if is_complete(run, record) else seen
    found = _run_ahead(run, record)
    ahead = _status(*found, seen) if found else None
    in_vain = ahead is not None and ahead.final and ahead.state != "COMPLETED"
    job = record.precompile.get("waits_for")
    compiling = f"job {job}, which compiles its graphs" if job else ""
    phases: list[PhaseStatus] = []
    for phase in record.phases:
        never = ""
        if record.refused:
            never = "never submitted"
        elif ahead and in_vain:
            never = f"never started: {ahead.run} is {ahead.state}"
        elif any(p.final and p.state != "COMPLETED" for p in phases):
            never = "never started: the phase before it did not complete"
        if phases:
            what = f"the precompile {'phase' if record.scheduler == 'local' else 'job'}"
            wait = Wait(what, never)
        else:
            dropped = f"never started: {compiling}, did not succeed" if compiling else ""
            room = f"the end of {record.behind}" if record.behind else ""
            still = room if room and seen and not seen.may_run(job) else compiling
            wait = Wait(record.after or still or room, never, dropped)
        phases.append(phase_status(run, record, phase, seen, wait))
    state, reason = _overall(record, phases)
    metrics = run.last_metrics()
    ended = _ended_by_steps(run, metrics) if state == "COMPLETED" else ""
    ahead_mend = ahead.mend if ahead and in_vain else ""
    if state == "RUNNING" and run.cancelled_file.exists():
        reason = reason or "cancelled: it saves a checkpoint and ends"
    return RunStatus(
        run=run.name,
        path=str(run.path),
        state=state,
        reason=ended or reason,
        recipe=record.recipe,
        preset=record.preset,
        cluster=record.cluster,
        nodes=record.nodes,
        created=record.created,
        phases=tuple(phases),
        after=record.after,
        then=record.then,
        group=record.group,
        values=record.values,
        precompile=record.precompile,
        metrics=metrics,
        mend=_next_command(run, record, state, ended, phases, ahead_mend),
        attempts=_attempts(run, record, phases[-1]),
        history=record.history,
        note=record.note,
        kept=record.kept,
    )


def _ended_by_steps(run: RunDir, metrics: Mapping[str, Any]) -> str:
    """Return where train.stop_at ended a training that has more steps, or nothing."""
    step, steps = (metrics.get(key, 0) for key in ("step", "steps"))
    if not isinstance(step, int) or not isinstance(steps, int) or not 0 < step < steps:
        return ""
    train = read_json(run.plan_file).get("train")
    stop_at = train.get("stop_at") if isinstance(train, Mapping) else None
    return f"{STOP_AT}, step {step} of {steps}" if stop_at == step else ""


def _attempts(run: RunDir, record: Record, last: PhaseStatus) -> tuple[Attempt, ...]:
    """Return every attempt of the last phase; one that was killed never wrote how it ended."""
    return tuple(
        replace(attempt, state="LOST", reason="it ended without a word")
        if attempt.state in ("STARTING", "RUNNING")
        and (attempt.attempt != last.attempt or last.final)
        else attempt
        for attempt in run.attempts(record.phases[-1])
    )


def _overall(record: Record, phases: Sequence[PhaseStatus]) -> tuple[str, str]:
    """Return state and reason of a run: those of its first phase that has not completed."""
    if record.refused:
        return "FAILED", f"refused at submission: {record.refused}"
    for number, phase in enumerate(phases[:-1], 1):
        if phase.state == "COMPLETED" or any(later.attempt for later in phases[number:]):
            continue
        if phase.state == "RUNNING":
            return "PRECOMPILING", phase.reason
        if phase.reason:
            return phase.state, f"{phase.phase}: {phase.reason}"
        return phase.state, f"in {phase.phase}" if phase.final else ""
    return phases[-1].state, phases[-1].reason


def _next_command(
    run: RunDir, record: Record, state: str, ended: str, phases: Sequence[PhaseStatus], ahead: str
) -> str:
    """Return the command with which a run continues; empty if it does by itself, or should not.

    `ended` says where steps ended one that completed, `ahead` is the command of a run that this one
    waits for in vain.
    """
    if PREPARE in record.phases:
        return ""  # submitted again, it continues where it was
    if state == "COMPLETED":
        goes_on = ended and run.newest_step()
        return f"trnslurm resume {run.name}" if goes_on else ""
    if run.cancelled_file.exists() and not record.refused:
        queued = any(phase.state in _QUEUED for phase in phases)
        return f"trnslurm cancel {run.name}" if queued else ""
    if ahead:
        return ahead
    last = run.attempts_since(record, record.phases[-1])[-1:]
    if state == "FAILED" and last and last[0].cause == ERROR:
        return ""  # it would only fail again
    held = state == "HELD" and any(map(held_by_slurm, phases))
    # Nobody asked for the end of what Slurm dropped because of another run's job.
    dropped = state == "CANCELLED" and not any(p.attempt or p.started for p in phases)
    dropped = dropped and any(p.reason for p in phases)
    if state in _STOPPED_SHORT or held or dropped:
        return f"trnslurm resume {run.name}"
    return ""
