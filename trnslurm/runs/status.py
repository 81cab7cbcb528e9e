"""Determines the state of a run, and the reason for it, from its phases."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.metrics import is_reported
from trnslurm.contract.rundir import PREPARE
from trnslurm.contract.states import State
from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.node.alone import so_far
from trnslurm.node.triage.mend import in_words
from trnslurm.records.run import ReadOnce, Record, RunDir
from trnslurm.runs.halving import Rungs
from trnslurm.runs.mend import next_command, saved_words
from trnslurm.runs.phase import phase_status
from trnslurm.schedulers.choice import by_scheduler, scheduler_of
from trnslurm.schedulers.interface import PhaseStatus, Seen, Wait
from trnslurm.schedulers.signs import died

STOP_AT = "train.stop_at"
_AS_RECORDED = (
    *("recipe", "preset", "cluster", "nodes", "created"),
    *("after", "needs", "then", "group", "values", "copied_from"),
    *("precompile", "history", "note", "kept"),
)
# What a run with a dependency waits for, and why Slurm dropped it.
_WAITS = {
    "afterok": ("job {}", "never started: job {} did not succeed"),
    "afterany": ("the end of job {}", ""),
    "afternotok": ("a failure of job {}", "never started: job {} did not fail"),
}


class RunStatus(Frozen):
    """The state of a run, its phases and attempts, and its latest metrics."""

    run: str
    """The name of the run."""
    path: str
    """The run directory."""
    state: State
    """The state, one word."""
    reason: str
    """The reason for the state, or empty."""
    recipe: str
    """The name of the recipe or of the script."""
    preset: str | None
    """The preset, or None without one."""
    cluster: str
    """The name of the cluster profile."""
    nodes: int
    """The number of nodes."""
    created: str
    """The time of the submission, in UTC."""
    phases: tuple[PhaseStatus, ...]
    """The state, the job and the nodes of each phase."""
    after: str
    """The run from whose result this run starts, or empty."""
    needs: tuple[str, ...]
    """The runs that must succeed before this run starts."""
    then: str
    """The run that waits for this run."""
    group: str
    """The sweep to which the run belongs, or empty."""
    values: Mapping[str, str]
    """The values that the sweep set for this run."""
    copied_from: str
    """The S3 directory whose newest checkpoint the run starts from, or empty."""
    precompile: Mapping[str, Any]
    """As in run.json: the key of the run's graphs, and why there was no precompile phase."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The latest line of metrics.jsonl."""
    mend: str = ""
    """The command that continues the run, or empty if there is none."""
    fix: str = ""
    """The fix that must come before that command, or empty if none is known."""
    attempts: tuple[Attempt, ...] = ()
    """Every attempt of the last phase, including those before a resume."""
    history: tuple[Mapping[str, Any], ...] = ()
    """As in run.json: the state of the run before each resume."""
    note: str = ""
    """The user's note about the run."""
    kept: bool = False
    """Whether `trnslurm keep` protects the run from removal."""

    @property
    def final(self) -> bool:
        """Whether the run has ended for good."""
        return self.state.final

    @property
    def words(self) -> str:
        """The state, followed by the reason if there is one."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def next(self) -> str:
        """The fix followed by the command, or empty if nothing needs to be done."""
        return in_words(self.fix, self.mend)


def run_status(run: RunDir, *, leftovers: bool = False) -> RunStatus:
    """Return the status of a run. With `leftovers`, ask Slurm even if the run has completed."""
    statuses, broken = statuses_of([run], leftovers=leftovers)
    if broken:
        raise broken[0]
    return statuses[0]


def statuses_of(
    runs: Sequence[RunDir], *, leftovers: bool = False
) -> tuple[list[RunStatus], list[RunError]]:
    """Return the statuses of runs, using one squeue call per cluster, and errors of damaged runs.

    The attempts are read before that call, and again after it for runs that had not completed. With
    `leftovers`, the status of a completed run suggests a cancel if Slurm still has one of its jobs.
    """
    records: list[tuple[RunDir, Record]] = []
    broken = []
    for each in runs:
        try:
            records.append((ReadOnce(each.path), each.record()))
        except RunError as error:
            broken.append(error)
    needed = list(records)
    for run, record in needed:  # grows: a run's state depends on the run that it waits for
        needed += [ahead for ahead in _runs_ahead(run, record) if ahead not in needed]
    seen = {
        scheduler: scheduler.look([each for each in those if not is_complete(*each)])
        for scheduler, those in by_scheduler(needed).items()
    }
    now = [r if is_complete(*r) else (ReadOnce(r[0].path), r[1]) for r in records]
    rungs = Rungs()
    found = [_status(run, record, seen[scheduler_of(record)], rungs) for run, record in now]
    if leftovers:
        every = [*zip(now, found, strict=True)]
        completed = [r for r, status in every if status.state is State.COMPLETED]
        asked = by_scheduler(completed).items()
        left = {run for scheduler, those in asked for run in scheduler.left_over(those)}
        found = [
            replace(status, mend=f"trnslurm cancel {status.run}") if run in left else status
            for (run, _), status in every
        ]
    return found, broken


def is_complete(run: RunDir, record: Record) -> bool:
    """Check whether the last phase completed, so that the job's state in Slurm does not matter."""
    last = run.newest_attempt(record, record.phases[-1])
    return last is not None and last.state is State.COMPLETED


def choose_attempt(run: RunDir, *, phase: str | None, attempt: int | None) -> Attempt:
    """Return the chosen attempt, by default the newest attempt of the last phase that has begun."""
    for name in run.phases_back(phase):
        attempts = run.attempts(name)
        found = [a for a in attempts if attempt in (None, a.attempt)]
        if found:
            return found[-1]
        if attempts:
            raise RunError(f"{run.name} has no attempt {attempt} of {name}, only {len(attempts)}")
    raise RunError(f"{run.name} has not started: there is no attempt of {phase or 'any phase'} yet")


def _runs_ahead(run: RunDir, record: Record) -> list[tuple[RunDir, Record]]:
    """Return the runs that a run waits for, except deleted ones; none if the run has begun."""
    if not record.awaited or any(run.attempts_since(record, p) for p in record.phases):
        return []
    found = []
    for ahead in map(run.sibling, record.awaited):
        with contextlib.suppress(RunError):
            found.append((ahead, ahead.record()))
    return found


def _status(run: RunDir, record: Record, seen: Seen, rungs: Rungs) -> RunStatus:
    scheduler = scheduler_of(record)
    seen = scheduler.look(()) if is_complete(run, record) else seen
    ahead = [_status(*each, seen, rungs) for each in _runs_ahead(run, record)]
    in_vain = next((a for a in ahead if a.final and a.state is not State.COMPLETED), None)
    awaited = [each.run for each in ahead if each.state is not State.COMPLETED]
    job = record.precompile.get("waits_for")
    compiling = f"job {job}, which compiles its graphs" if job else ""
    phases: list[PhaseStatus] = []
    for phase in record.phases:
        never = ""
        if record.refused:
            never = "never submitted"
        elif in_vain:
            never = f"never started: {in_vain.run} is {in_vain.state}"
        elif any(p.final and p.state is not State.COMPLETED for p in phases):
            never = "never started: the previous phase did not complete"
        if phases:
            wait = Wait(f"the precompile {scheduler.phase_word}", never)
        else:
            dropped = f"never started: {compiling}, did not succeed" if compiling else ""
            room = f"the end of {record.behind}" if record.behind else ""
            kind, _, other = record.depends.partition(":")
            room = room or (_WAITS[kind][0].format(other) if kind in _WAITS else "")
            dropped = dropped or (_WAITS[kind][1].format(other) if kind in _WAITS else "")
            still = room if room and not seen.may_run(job) else compiling
            wait = Wait(" and ".join(awaited or record.awaited) or still or room, never, dropped)
        phases.append(phase_status(run, record, phase, seen, wait))
    state, reason = _overall(record, phases)
    metrics = run.last_metrics()
    ended = _ended_by_steps(run, metrics) if state is State.COMPLETED else ""
    ahead_mend = in_vain.mend if in_vain else ""
    if state is State.RUNNING and run.cancelled_file.exists():
        reason = reason or "cancelled: saving a checkpoint first; use cancel --now to skip it"
    if state is State.RUNNING and phases[-1].phase == "train":
        reason = reason or so_far(run, phases[-1].attempt)
    if state is State.CANCELLED and phases[-1].attempt and PREPARE not in record.phases:
        bare = not reason or scheduler.ended_by_others(reason)
        saved = saved_words(run) or ("no step is saved" if bare else "")
        reason = reason if "step " in reason else "; ".join(filter(None, [reason, saved]))
    if state is State.CANCELLED and run.cancelled_file.exists() and "never " not in reason:
        reason = "; ".join(filter(None, ["by trnslurm cancel", reason]))
    mend = next_command(run, record, state, ended, phases, ahead_mend)
    if told := rungs.tell(run, record, state):
        state, ended, mend = told.state, told.reason, told.mend
    return RunStatus(
        **{name: getattr(record, name) for name in _AS_RECORDED},
        run=run.name,
        path=str(run.path),
        state=state,
        reason=ended or reason,
        phases=tuple(phases),
        metrics=metrics,
        mend=mend,
        attempts=_attempts(run, record, phases[-1]),
    )


def _ended_by_steps(run: RunDir, metrics: Mapping[str, Any]) -> str:
    """Return the step at which a run ended early, in words, or an empty string.

    A run ends early because of train.stop_at, or because a custom script exits with 0 before the
    last of the steps that it reports.
    """
    step, steps = (metrics.get(key, 0) for key in ("step", "steps"))
    if not isinstance(step, int) or not isinstance(steps, int) or not 0 < step < steps:
        return ""
    if not is_reported(metrics):  # a script need not print its last step
        return ""
    if run.enough_file.exists():  # the attempt's own reason says more
        return ""
    train = read_json(run.plan_file).get("train")
    stop_at = train.get("stop_at") if isinstance(train, Mapping) else None
    if stop_at == step:
        return f"{STOP_AT}, step {step} of {steps}"
    return f"the script ended at step {step} of {steps}" if run.project_file.exists() else ""


def _attempts(run: RunDir, record: Record, last: PhaseStatus) -> tuple[Attempt, ...]:
    """Return every attempt of the last phase, as LOST if it was killed and wrote no end state."""
    return tuple(
        replace(attempt, state=State.LOST, reason=died(attempt))
        if attempt.under_way and (attempt.attempt != last.attempt or last.final)
        else attempt
        for attempt in run.attempts(record.phases[-1])
    )


def _overall(record: Record, phases: Sequence[PhaseStatus]) -> tuple[State, str]:
    """Return the state and reason of the first phase that has not completed."""
    if record.refused:
        return State.FAILED, f"rejected at submission: {record.refused}"
    for number, phase in enumerate(phases[:-1], 1):
        if phase.state is State.COMPLETED or any(later.attempt for later in phases[number:]):
            continue
        if phase.state is State.RUNNING:
            return State.PRECOMPILING, phase.reason
        if phase.reason:
            return phase.state, f"{phase.phase}: {phase.reason}"
        return phase.state, f"in {phase.phase}" if phase.final else ""
    return phases[-1].state, phases[-1].reason
