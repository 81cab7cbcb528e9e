"""Determines a run's state, its reason and the command that continues it; compares a sweep."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.states import EndCause, State
from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.node.triage.mend import SUBMIT, in_words, longer, new_submission, short, way_back
from trnslurm.records.run import (
    ByHand,
    ReadOnce,
    Record,
    RunDir,
    latest_values,
)
from trnslurm.rundir import (
    PREPARE,
    changed_at,
    read_json,
    seconds_of,
    utc_time,
)
from trnslurm.runs.by_hand import start_by_hand
from trnslurm.runs.phase import phase_status
from trnslurm.runs.unreported import unreported
from trnslurm.schedulers.choice import by_scheduler, scheduler_of
from trnslurm.schedulers.interface import PhaseStatus, Seen, Wait
from trnslurm.schedulers.signs import died

if TYPE_CHECKING:
    from trnslurm.node.triage.finding import Finding

STOP_AT = "train.stop_at"
_AS_RECORDED = (
    *("recipe", "preset", "cluster", "nodes", "created", "after", "then", "group", "values"),
    "copied_from",
    *("precompile", "history", "note", "kept"),
)
# The reason of an attempt whose cause nobody knew.
_BARE = re.compile(r"exit code \d+ while running on [\w.,\[\]-]+")
_GIVEN_UP = "given up after"
_CAP_KEY = re.compile(r"\((slurm\.max_\w+)[:)]")
# What a run with a dependency waits for, and why Slurm dropped it.
_WAITS = {
    "afterok": ("job {}", "never started: job {} did not succeed"),
    "afterany": ("the end of job {}", ""),
    "afternotok": ("a failure of job {}", "never started: job {} did not fail"),
}
NO_NUMBERS = (
    "its script has reported no numbers: call trnslurm.report(step=, loss=) after each step, "
    "or give Trainer a RunCallback (docs/scripts.md)"
)
UNTOLD_S = 60.0
"""How long a training gives no sign of progress before `status` says so."""
_UNTOLD = {State.COMPLETED, State.STOPPED, State.TIMEOUT, State.PREEMPTED, State.CANCELLED}
_COMPARED_BY = ("eval_loss", "loss")


class RunStatus(Frozen):
    """The state of a run, its phases and attempts, and its latest metrics."""

    run: str
    path: str
    state: State
    reason: str
    recipe: str
    preset: str | None
    cluster: str
    nodes: int
    created: str
    phases: tuple[PhaseStatus, ...]
    after: str
    """The run that this run waits for, or waited for; empty if there is none."""
    then: str
    """The run that waits for this run."""
    group: str
    """The sweep that the run belongs to; empty if there is none."""
    values: Mapping[str, str]
    """The values that the sweep set for this run."""
    copied_from: str
    """The place in S3 from whose newest checkpoint the run begins; empty if there is none."""
    precompile: Mapping[str, Any]
    """As in run.json: the key of the run's graphs, and why there was no precompile phase."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The latest line of metrics.jsonl."""
    mend: str = ""
    """The command that continues the run; empty if it needs none, or should not continue."""
    fix: str = ""
    """What to correct before that command, in short; empty if nothing, or if it is not known."""
    attempts: tuple[Attempt, ...] = ()
    """Every attempt of the last phase, including those before a resume."""
    history: tuple[Mapping[str, Any], ...] = ()
    """As in run.json: the run before each resume."""
    note: str = ""
    """The user's note about the run."""
    kept: bool = False
    """Whether `trnslurm keep` protects the run from removal."""

    @property
    def final(self) -> bool:
        return self.state.final

    @property
    def words(self) -> str:
        """The state, with the reason if there is one."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def next(self) -> str:
        """What to do: the fix, then the command; empty if nothing is to be done."""
        return in_words(self.fix, self.mend)


def run_status(run: RunDir, *, leftovers: bool = False) -> RunStatus:
    """Return the status of a run; with `leftovers`, ask Slurm even if the run has completed."""
    statuses, broken = statuses_of([run], leftovers=leftovers)
    if broken:
        raise broken[0]
    return statuses[0]


def statuses_of(
    runs: Sequence[RunDir], *, leftovers: bool = False
) -> tuple[list[RunStatus], list[RunError]]:
    """Return the statuses of runs, from one squeue call per cluster, and errors of damaged runs.

    The attempts are read before that call, and again after it for runs that had not completed. With
    `leftovers`, a run that has completed is to be cancelled if Slurm still has a job of it.
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
        ahead = _run_ahead(run, record)
        if ahead and ahead not in needed:
            needed.append(ahead)
    seen = {
        scheduler: scheduler.look([each for each in those if not is_complete(*each)])
        for scheduler, those in by_scheduler(needed).items()
    }
    now = [r if is_complete(*r) else (ReadOnce(r[0].path), r[1]) for r in records]
    found = [_status(run, record, seen[scheduler_of(record)]) for run, record in now]
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
    """Check whether the last phase completed, so that Slurm's state of the job does not matter."""
    last = run.newest_attempt(record, record.phases[-1])
    return last is not None and last.state is State.COMPLETED


def choose_attempt(run: RunDir, *, phase: str | None, attempt: int | None) -> Attempt:
    """Return the chosen attempt, by default the newest attempt of the last phase that began."""
    for name in run.phases_back(phase):
        attempts = run.attempts(name)
        found = [a for a in attempts if attempt in (None, a.attempt)]
        if found:
            return found[-1]
        if attempts:
            raise RunError(f"{run.name} has no attempt {attempt} of {name}, only {len(attempts)}")
    raise RunError(f"{run.name} has not begun: there is no attempt of {phase or 'any phase'} yet")


def why_it_failed(run: RunDir, status: RunStatus) -> Finding | None:
    """Return what triage finds in a run that failed, or was requeued after a crash."""
    for phase in reversed(status.phases):
        if not phase.attempt:
            continue
        crashed = phase.state is State.REQUEUED and not run.was_stopped(phase.phase, phase.attempt)
        # Nothing reported or saved until the time limit: the workers may never have met.
        still = phase.state is State.TIMEOUT and not (run.newest_step() or run.last_metrics())
        if phase.state.failed or crashed or still:
            from trnslurm.node.triage.finding import find_cause  # its patterns are for this only

            found = find_cause(run.path, phase.phase, phase.attempt)
            told = found and found.name and found.name != "time-limit"
            return found if told or not still else None
    return None


def explained(run: RunDir, status: RunStatus) -> tuple[RunStatus, Finding | None]:
    """Return a status whose reason and next command have what triage finds, and that finding.

    A node records the cause itself, unless it died before, or its logs were not complete then.
    """
    found = why_it_failed(run, status)
    status = _with_canceller(run, status)
    status = _by_hand(run, _without_loss(run, status, _with_fix(run, status, found)))
    if not found or found.line in status.reason:
        return status, found
    named = found  # for the function below

    def tell(reason: str) -> str:
        untold = (State.LOST, State.NODE_FAIL, State.TIMEOUT)
        if not _BARE.search(reason) and named.brief and status.state in untold:
            return "; ".join(filter(None, [reason, named.brief]))
        return _BARE.sub(lambda _: named.line, reason)

    phases = [
        replace(phase, reason=tell(phase.reason))
        if (phase.phase, phase.attempt) == (found.phase, found.attempt)
        else phase
        for phase in status.phases
    ]
    return replace(status, reason=tell(status.reason), phases=tuple(phases)), found


def _with_canceller(run: RunDir, status: RunStatus) -> RunStatus:
    """Return a status that names the user who ended the run without us, if that is known."""
    scheduler = scheduler_of(run.record())
    unnamed = scheduler.by_others()
    if status.state is not State.CANCELLED or not status.reason.startswith(unnamed):
        return status
    named = scheduler.by_others(scheduler.canceller([phase.job_id for phase in status.phases]))
    phases = (replace(p, reason=p.reason.replace(unnamed, named)) for p in status.phases)
    reason = status.reason.replace(unnamed, named)
    return replace(status, reason=reason, phases=tuple(phases))


def _with_fix(run: RunDir, status: RunStatus, found: Finding | None) -> RunStatus:
    """Return a status with what to correct, and the command that continues the run after that."""
    resume = f"trnslurm resume {run.name}"
    if not (status.mend or resume).startswith(resume) or run.cancelled_file.exists():
        return status
    failed = status.state.failed
    if not (failed or status.mend):
        return status
    from trnslurm.node.triage.causes import cause_of  # many patterns

    record = run.record()
    saved = bool(run.newest_step() or changed_at(run.saves_in))  # a script may find its own
    known = cause_of([record.refused]) if failed and not found else None
    if (last := run.newest_attempt(record, record.phases[-1])) and last.cause == EndCause.REPEATS:
        fix = "have the script load what it finds in {checkpoints} when it starts"
        fix, mend = new_submission(asdict(record), fix)
    elif status.state is State.TIMEOUT and not (saved or found or status.mend.endswith("=MORE")):
        fix, mend = longer(asdict(record))
    elif found and failed and found.mend == SUBMIT and not found.options and _continues_work(run):
        # A new run would begin at step 0.
        fix, mend = f"{short(found.fix)} (in work/ of the run directory)", resume
    elif found and (failed or status.state is State.TIMEOUT):
        fix, mend = way_back(
            asdict(record),
            found.mend,
            found.fix,
            found.options,
            saved=saved,
            given_up=_GIVEN_UP in status.reason,
            command=status.mend,
        )
    elif known:
        what = known.explain([record.refused])[1]
        fix, mend = way_back(asdict(record), known.mend, what)
    else:
        return status
    return replace(status, fix=fix, mend=mend)


def _continues_work(run: RunDir) -> bool:
    """Check whether a custom script would go on from what it saved, with the run's copy of it."""
    return bool(run.newest_step()) and run.project_file.exists() and (run.path / "work").is_dir()


def _by_hand(run: RunDir, status: RunStatus) -> RunStatus:
    """Return a status whose command starts a bundle as it was started, without trnslurm."""
    record = run.record()
    if not isinstance(record, ByHand) or not status.mend.startswith("trnslurm resume"):
        return status
    return replace(status, mend=start_by_hand(run, record))


def _without_loss(run: RunDir, before: RunStatus, status: RunStatus) -> RunStatus:
    """Return a status that leads to no resume over checkpoints of which the run does not know.

    `before` is the status without a fix.
    """
    resume = f"trnslurm resume {run.name}"
    if resume not in (before.mend, status.mend) or not (left := unreported(run)):
        return status
    fix, mend, record = status.fix, status.mend, run.record()
    if mend == resume:
        fix, mend = new_submission(asdict(record), "")
    again = start_by_hand(run, record) if isinstance(record, ByHand) else f"{resume} --force"
    own = f"`{again}` if the script finds {left} itself; if not, pass it to the script, and call "
    own += "trnslurm.saved() there"
    return replace(status, fix=", then ".join(filter(None, [own, fix])), mend=mend)


def no_numbers(statuses: Sequence[RunStatus]) -> str:
    """Return which custom scripts reported no step, and what to add to them; empty if all did."""
    silent = [status.run for status in statuses if _lacks_numbers(status)]
    if not silent or len(statuses) == 1:
        return NO_NUMBERS if silent else ""
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return f"{silent[0]}{more}: {NO_NUMBERS}"


def _lacks_numbers(status: RunStatus) -> bool:
    """Check whether a custom script has trained for a while, and never reported a step."""
    if "step" in status.metrics or not RunDir(Path(status.path)).project_file.exists():
        return False
    if status.state in _UNTOLD:
        return bool(status.attempts)
    began = seconds_of(status.phases[-1].started or "") if status.state is State.RUNNING else None
    return began is not None and time.time() - began > UNTOLD_S


def _run_ahead(run: RunDir, record: Record) -> tuple[RunDir, Record] | None:
    """Return the run that a run waits for; None if the run has begun, or the other is deleted."""
    if not record.after or any(run.attempts_since(record, p) for p in record.phases):
        return None
    ahead = run.sibling(record.after)
    try:
        return ahead, ahead.record()
    except RunError:
        return None


def _status(run: RunDir, record: Record, seen: Seen) -> RunStatus:
    scheduler = scheduler_of(record)
    seen = scheduler.look(()) if is_complete(run, record) else seen
    found = _run_ahead(run, record)
    ahead = _status(*found, seen) if found else None
    in_vain = ahead is not None and ahead.final and ahead.state is not State.COMPLETED
    job = record.precompile.get("waits_for")
    compiling = f"job {job}, which compiles its graphs" if job else ""
    phases: list[PhaseStatus] = []
    for phase in record.phases:
        never = ""
        if record.refused:
            never = "never submitted"
        elif ahead and in_vain:
            never = f"never started: {ahead.run} is {ahead.state}"
        elif any(p.final and p.state is not State.COMPLETED for p in phases):
            never = "never started: the phase before it did not complete"
        if phases:
            wait = Wait(f"the precompile {scheduler.phase_word}", never)
        else:
            dropped = f"never started: {compiling}, did not succeed" if compiling else ""
            room = f"the end of {record.behind}" if record.behind else ""
            kind, _, other = record.depends.partition(":")
            room = room or (_WAITS[kind][0].format(other) if kind in _WAITS else "")
            dropped = dropped or (_WAITS[kind][1].format(other) if kind in _WAITS else "")
            still = room if room and not seen.may_run(job) else compiling
            wait = Wait(record.after or still or room, never, dropped)
        phases.append(phase_status(run, record, phase, seen, wait))
    state, reason = _overall(record, phases)
    metrics = run.last_metrics()
    ended = _ended_by_steps(run, metrics) if state is State.COMPLETED else ""
    ahead_mend = ahead.mend if ahead and in_vain else ""
    if state is State.RUNNING and run.cancelled_file.exists():
        reason = reason or "cancelled: it is asked to save and to end; cancel --now does not wait"
    if state is State.CANCELLED and phases[-1].attempt and PREPARE not in record.phases:
        bare = not reason or scheduler.ended_by_others(reason)
        saved = _saved(run) or ("no step is saved" if bare else "")
        reason = reason if "step " in reason else "; ".join(filter(None, [reason, saved]))
    if state is State.CANCELLED and run.cancelled_file.exists() and "never " not in reason:
        reason = "; ".join(filter(None, ["by trnslurm cancel", reason]))
    return RunStatus(
        **{name: getattr(record, name) for name in _AS_RECORDED},
        run=run.name,
        path=str(run.path),
        state=state,
        reason=ended or reason,
        phases=tuple(phases),
        metrics=metrics,
        mend=_next_command(run, record, state, ended, phases, ahead_mend),
        attempts=_attempts(run, record, phases[-1]),
    )


def _saved(run: RunDir) -> str:
    """Return what a run has saved, in words; empty if that is nothing."""
    if step := run.newest_step():
        return f"step {step} is saved"
    place = run.saves_in
    changed = changed_at(place)  # a custom script may not report its steps
    return f"{place.relative_to(run.path)}/ was written {utc_time(changed)}" if changed else ""


def _ended_by_steps(run: RunDir, metrics: Mapping[str, Any]) -> str:
    """Return the step at which a training ended early, in words; or nothing.

    By train.stop_at; or a custom script exited with 0 before the last of the steps it reports.
    """
    step, steps = (metrics.get(key, 0) for key in ("step", "steps"))
    if not isinstance(step, int) or not isinstance(steps, int) or not 0 < step < steps:
        return ""
    train = read_json(run.plan_file).get("train")
    stop_at = train.get("stop_at") if isinstance(train, Mapping) else None
    if stop_at == step:
        return f"{STOP_AT}, step {step} of {steps}"
    return f"its script ended at step {step} of {steps}" if run.project_file.exists() else ""


def _attempts(run: RunDir, record: Record, last: PhaseStatus) -> tuple[Attempt, ...]:
    """Return every attempt of the last phase; LOST if it was killed and wrote no end state."""
    return tuple(
        replace(attempt, state=State.LOST, reason=died(attempt))
        if attempt.under_way and (attempt.attempt != last.attempt or last.final)
        else attempt
        for attempt in run.attempts(record.phases[-1])
    )


def _overall(record: Record, phases: Sequence[PhaseStatus]) -> tuple[State, str]:
    """Return state and reason of the first phase that has not completed."""
    if record.refused:
        return State.FAILED, f"refused at submission: {record.refused}"
    for number, phase in enumerate(phases[:-1], 1):
        if phase.state is State.COMPLETED or any(later.attempt for later in phases[number:]):
            continue
        if phase.state is State.RUNNING:
            return State.PRECOMPILING, phase.reason
        if phase.reason:
            return phase.state, f"{phase.phase}: {phase.reason}"
        return phase.state, f"in {phase.phase}" if phase.final else ""
    return phases[-1].state, phases[-1].reason


def _next_command(
    run: RunDir, record: Record, state: State, ended: str, phases: Sequence[PhaseStatus], ahead: str
) -> str:
    """Return the command that continues a run; empty if it needs none, or should not continue.

    `ended` says where a completed run ended early. `ahead` is the command that continues
    the failed run that this run waits for.
    """
    if PREPARE in record.phases:
        return ""  # another submission continues where this run ended
    if state is State.COMPLETED:
        has_more = ended and run.newest_step()
        return f"trnslurm resume {run.name}" if has_more else ""
    if run.cancelled_file.exists() and not record.refused:
        queued = any(phase.state.queued for phase in phases)
        if queued:
            return f"trnslurm cancel {run.name}"
        has_begun = phases[-1].final and phases[-1].attempt
        return f"trnslurm resume {run.name}" if has_begun else ""
    if ahead:
        return ahead
    last = run.newest_attempt(record, record.phases[-1])
    if state.stopped_short and last and last.cause == EndCause.CAP:
        found = _CAP_KEY.search(last.reason)
        return f"trnslurm resume {run.name} --set {found[1]}=MORE" if found else ""
    if state is State.FAILED and last and last.cause == EndCause.ERROR:
        return ""  # a retry would fail again
    if state is State.CANCELLED and last and _saved(run):
        return f"trnslurm resume {run.name}"
    scheduler = scheduler_of(record)
    held = state is State.HELD and any(map(scheduler.holds, phases))
    # Slurm cancelled the job because another run's job failed; no user did.
    dropped = state is State.CANCELLED and not any(p.attempt or p.started for p in phases)
    dropped = dropped and any(p.reason and not scheduler.ended_by_others(p.reason) for p in phases)
    if state.stopped_short or held or dropped:
        return f"trnslurm resume {run.name}"
    return ""


class Standing(Frozen):
    """The runs of a sweep, compared."""

    statuses: Sequence[RunStatus]
    metric: str
    """The metric by which the runs are compared."""
    scores: Sequence[float | None]
    """Each run's latest value of the metric; None if it has no finite value."""
    best: RunStatus | None
    """The run with the lowest score, or the highest if that was chosen."""

    @property
    def group(self) -> str:
        """The name of the sweep."""
        return self.statuses[0].group

    @property
    def states(self) -> dict[str, int]:
        """Return the number of runs in each state."""
        return dict(collections.Counter(status.state for status in self.statuses))

    @property
    def final(self) -> bool:
        """Check whether all runs have ended."""
        return all(status.final for status in self.statuses)

    @property
    def mend(self) -> str:
        """The command that resumes the runs that stopped early; empty if none did."""
        stopped = [s for s in self.statuses if s.mend == f"trnslurm resume {s.run}"]
        if len(stopped) == 1:
            return stopped[0].mend
        return f"trnslurm resume {self.group}" if stopped else ""

    @property
    def to_correct(self) -> dict[str, list[str]]:
        """Return what to correct before a new submission, and the runs that failed for it."""
        found: dict[str, list[str]] = {}
        for status in self.statuses:
            if status.fix and status.mend != f"trnslurm resume {status.run}":
                found.setdefault(status.next, []).append(status.run)
        return found


def standing_of(
    runs: Sequence[RunDir], *, lowest: str | None = None, highest: str | None = None
) -> Standing:
    """Compare runs by the latest value of a metric: the lowest is the best, or the highest.

    The default metric is the held-out loss, or the training loss if nothing is held out.
    """
    if lowest and highest:
        raise RunError("the best is the lowest or the highest of one metric: name one")
    statuses, broken = statuses_of(runs)
    if broken:
        raise broken[0]
    statuses = [
        explained(run, status)[0] if status.state is State.FAILED else status
        for run, status in zip(runs, statuses, strict=True)
    ]
    found = [latest_values(run.steps()) for run in runs]
    chosen = highest or lowest
    names = [chosen] if chosen else _COMPARED_BY
    metric = next((name for name in names if any(name in s for s in found)), names[-1])
    if chosen and not any(metric in s for s in found) and any(found):
        known = ", ".join(sorted({name for s in found for name in s}))
        raise RunError(f"no run reports {metric}; the runs report {known}")
    scores = [s.get(metric) for s in found]
    sign = -1 if highest else 1
    scored = [(sign * score, place) for place, score in enumerate(scores) if score is not None]
    return Standing(
        statuses=statuses,
        metric=metric,
        scores=scores,
        best=statuses[min(scored)[1]] if scored else None,
    )
