"""Successive halving: the rungs of a sweep, their job arrays, and how such a sweep is resumed.

All rungs are queued at once. The first rung is the sweep's own runs. Each later rung is an array
that waits until the previous rung has ended (see contract/halving.py for the files).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.console import Console
from trnslurm.contract.attempt import TRAIN
from trnslurm.contract.checkpoints import exported_in
from trnslurm.contract.files import write_file, write_json
from trnslurm.contract.halving import (
    Halving,
    divide,
    ranking_file,
    read_halving,
    read_place,
    read_ranking,
    rung_place,
)
from trnslurm.contract.rundir import HALVING, PACKAGE, PLAN
from trnslurm.contract.states import State
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, RunError, SubmitError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import refuse_foreign
from trnslurm.records.run import Record, RunDir
from trnslurm.render.array import can_be_task, render_rung, shared_options
from trnslurm.render.project import asks_to_stop
from trnslurm.runs.halving import Rungs, in_queue, may_run, sweep_of
from trnslurm.runs.status import RunStatus, is_complete
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import Scheduler
from trnslurm.submission.job import Job
from trnslurm.submission.submission import Submission

_OPTION = "--halving"


class Asked(Frozen):
    """The value of --halving, and the metric by which it compares runs."""

    factor: int
    first: int = 0
    """The last step of the first rung, or 0 to derive it from the total number of steps."""
    metric: str = ""
    highest: bool = False

    @property
    def words(self) -> str:
        return f"{_OPTION} {self.factor}" + (f":{self.first}" if self.first else "")


def parse_halving(text: str, *, lowest: str | None, highest: str | None) -> Asked:
    """Parse a value such as `3` or `3:100`, along with the metric of --lowest or --highest."""
    match = re.fullmatch(r"(\d{1,4})(?::([1-9]\d{0,11}))?", text)
    if not match or int(match[1]) < 2:
        raise ConfigError(
            f"{_OPTION} {text}: expected a factor of at least 2, as in {_OPTION} 3, optionally "
            f"with the steps of the first rung, as in {_OPTION} 3:100"
        )
    if lowest and highest:
        raise ConfigError("--lowest and --highest: pass only one of them, with one metric")
    metric = lowest or highest or ""
    return Asked(
        factor=int(match[1]), first=int(match[2] or 0), metric=metric, highest=bool(highest)
    )


def plan_rungs(asked: Asked, jobs: Sequence[Job], *, unknown: bool) -> Halving:
    """Return the rungs for a sweep's jobs. Reject jobs that cannot stop early and continue.

    `unknown` means that epochs end the jobs after an unknown number of steps.
    """
    plans = [json.loads(job.bundle.files[PLAN]) for job in jobs]
    first, plan = jobs[0], plans[0]
    if not first.has_queue:
        raise ConfigError(
            f"{_OPTION}: rungs require Slurm's job arrays, but {first.cluster} is "
            f"{first.scheduler.words}"
        )
    if first.project is None:
        _refuse_recipe(first.recipe, [each["train"] for each in plans])
    else:
        _refuse_script(first, plan["steps"])
    if len({each["steps"] for each in plans}) > 1:
        least, most = min(p["steps"] for p in plans), max(p["steps"] for p in plans)
        raise ConfigError(
            f"{_OPTION} compares runs at the same step: these have {least} to {most} steps"
        )
    if len(jobs) < 2:
        raise ConfigError(f"{_OPTION}: a single run cannot be compared with others")
    steps = int(plan["steps"])
    if unknown:
        raise ConfigError(
            f"{_OPTION}: train.epochs ends the runs after a number of steps that depends on the "
            "data: pass --set steps=N"
        )
    if asked.first >= steps:
        raise ConfigError(
            f"{asked.words}: the runs have only {steps:,} steps: choose a smaller number"
        )
    rungs = divide(len(jobs), steps, asked.factor, asked.first)
    if not rungs[0].stop_at:
        raise ConfigError(
            f"{asked.words}: {steps:,} steps are too few for {len(rungs)} rungs: choose a larger "
            f"factor, or set the steps of the first rung, as in {_OPTION} {asked.factor}:1"
        )
    if first.caps.get("attempts", len(rungs)) < len(rungs):
        raise ConfigError(
            f"{_OPTION}: slurm.max_attempts is {first.caps['attempts']:g}, but each of the "
            f"{len(rungs)} rungs is an attempt"
        )
    scripts = [job.script(TRAIN) for job in jobs]
    if len({shared_options(script) for script in scripts}) > 1:
        raise ConfigError(
            f"{_OPTION}: the runs have different #SBATCH options, but a later rung is one array "
            "for all of them: sweep other keys"
        )
    if not can_be_task(scripts[0], TRAIN):
        raise ConfigError(
            f"{_OPTION}: {TRAIN}.sbatch was rendered from a custom template, which cannot be a "
            "task of a job array"
        )
    return Halving(factor=asked.factor, rungs=rungs, metric=asked.metric, highest=asked.highest)


def _refuse_recipe(recipe: str, trains: Sequence[Mapping[str, Any]]) -> None:
    """Reject a recipe whose runs cannot end at a given step, or cannot continue from there."""
    if any("stop_at" not in train for train in trains):
        raise ConfigError(f"{_OPTION}: {recipe} has no train.stop_at, so a rung cannot end it")
    if any(train["stop_at"] for train in trains):
        raise ConfigError(f"{_OPTION} decides when the runs stop: remove train.stop_at")
    if not all(train.get("save_every") or train.get("save_minutes") for train in trains):
        raise ConfigError(
            f"{_OPTION}: train.save_every is 0, so a rung would not find a checkpoint from the "
            "previous one"
        )


def _refuse_script(job: Job, steps: int | None) -> None:
    """Reject a custom script that does not report its steps, or cannot stop and continue."""
    if steps is None:
        raise ConfigError(
            f"{_OPTION}: {job.recipe} decides its number of steps itself: pass --set steps=N, and "
            "add {steps} to its arguments"
        )
    if not asks_to_stop(job.bundle.files):
        raise ConfigError(
            f"{_OPTION}: {job.recipe} never checks whether to stop, so a rung cannot end it: call "
            "trnslurm.should_stop() after trnslurm.report(), or use RunCallback"
        )
    if not exported_in(job.script(TRAIN).decode(errors="replace"), Variable.RESUMES):
        raise ConfigError(
            f"{_OPTION}: {job.recipe} does not load a checkpoint, so a rung would start at step "
            "0: add {resume} to its arguments"
        )


def refuse_too_many(halving: Halving, most: int) -> None:
    """Reject rungs with more tasks than the cluster's arrays can have."""
    if (tasks := halving.rungs[1].runs) > most:
        raise SubmitError(
            f"{_OPTION}: the second rung is an array of {tasks} tasks, but this cluster's "
            f"MaxArraySize allows {most}: submit fewer runs, or choose a larger factor"
        )


def write_rungs(sweep: Path, runs: Sequence[RunDir], submission: Submission) -> None:
    """Write the later rungs of a sweep whose runs already have their directories."""
    halving, job = submission.halving, submission.job
    assert halving is not None
    sweep.mkdir(exist_ok=True)  # others may know its name, and write to the run root
    refuse_foreign(sweep, "submit from")
    write_file(sweep / Path(PACKAGE).name, job.bundle.files[PACKAGE])
    for number in range(2, len(halving.rungs) + 1):
        place = rung_place(sweep, number)
        place.mkdir()
        text = render_rung(
            job.script(TRAIN),
            submission.sweep,
            TRAIN,
            halving.rungs,
            number,
            at_most=submission.at_most,
            cluster=job.profile,
        )
        (place / job.scheduler.script_name(TRAIN)).write_bytes(text)
    write_json(sweep / HALVING, replace(halving, runs=tuple(run.name for run in runs)).facts())


def start_rungs(
    sweep: Path, runs: Sequence[RunDir], scheduler: Scheduler, console: Console
) -> None:
    """Submit the arrays of the later rungs, each after the previous one. Submit all or none."""
    jobs = sorted(set(map(_array, runs)), key=int)
    console.say(_submit_from(sweep, 2, jobs, runs[0], scheduler))


def _submit_from(
    sweep: Path,
    number: int,
    after: Sequence[str],
    run: RunDir,
    scheduler: Scheduler,
    *,
    tasks: Sequence[int] = (),
    also: Sequence[str] = (),
) -> str:
    """Submit the arrays from a rung on, with only some `tasks` of the first one if they are given.

    Return their jobs in words. The first array waits for the jobs `after`. The second array also
    waits for the jobs `also`.
    """
    halving = halving_at(sweep)
    rungs = [*halving.rungs]
    started: list[str] = []
    try:
        for at in range(number, len(rungs) + 1):
            some = ",".join(map(str, tasks)) if at == number else ""
            job = scheduler.start_rung(rung_place(sweep, at), run, after, some)
            started.append(job)
            rungs[at - 1] = replace(rungs[at - 1], job=job)
            after = [job, *(also if at == number else ())]
            write_json(sweep / HALVING, replace(halving, rungs=tuple(rungs)).facts())
    except BaseException:
        scheduler.cancel_jobs(started[::-1])
        raise
    jobs = ", ".join(f"rung {at} job {job}" for at, job in enumerate(started, number))
    return f"Queued, each after the previous one: {jobs}"


def halving_at(sweep: Path) -> Halving:
    """Return the rungs of a sweep, which must be readable."""
    if halving := read_halving(sweep):
        return halving
    raise RunError(f"{sweep / HALVING}: damaged or unreadable")


def cancel_rungs(runs: Sequence[RunDir]) -> None:
    """Cancel the later rungs of each sweep whose runs are all cancelled."""
    sweeps = {sweep_of(run, record): record for run in runs if (record := run.record()).group}
    for sweep, record in sweeps.items():
        halving, named = read_halving(sweep), {run.name for run in runs}
        if halving and {name for name in halving.runs if (sweep.parent / name).is_dir()} <= named:
            jobs = [rung.job for rung in halving.rungs if rung.job]
            scheduler_of(record).cancel_jobs(jobs[::-1])


def goes_on(run: RunDir) -> bool:
    """Check whether a later rung may continue a run that has ended."""
    at = read_place(run)
    return at is not None and at.rung < at.rungs


def leave_rungs(run: RunDir, record: Record, *, own_step: bool) -> None:
    """Let a resumed run continue to its own last step, unless its rung still counts the run."""
    at = Rungs().rung_of(run, record)
    if at and at.rung < at.rungs and (own_step or at.over or is_complete(run, record)):
        run.rung_file.unlink(missing_ok=True)


def resume_rungs(
    runs: Sequence[RunDir],
    statuses: Sequence[RunStatus],
    resume: Callable[[RunDir], object],
    console: Console,
) -> list[RunDir]:
    """Resume a sweep from the rung that it had reached, and return the resumed runs.

    `resume` resumes one run. The later rungs are submitted again if they have left the queue.
    """
    first, record = runs[0], runs[0].record()
    sweep, scheduler = sweep_of(first, record), scheduler_of(record)
    refuse_foreign(sweep, "resume")
    halving, rungs = halving_at(sweep), Rungs()
    now = max((n for n in range(2, len(halving.rungs) + 1) if _taken(sweep, n)), default=1)
    queued = [n for n in range(2, len(halving.rungs) + 1) if in_queue(halving, n, scheduler)]
    ended: list[RunDir] = []
    freed = False
    for run, status in zip(runs, statuses, strict=True):
        at = rungs.rung_of(run, run.record())
        held = status.state is State.HELD and status.mend == f"trnslurm resume {run.name}"
        if not at or not (status.final or held) or status.state is State.COMPLETED:
            continue
        if is_complete(run, run.record()):  # it has done its part of a rung, and may go on
            freed = freed or run.cancelled_file.exists()
            run.cancelled_file.unlink(missing_ok=True)
        elif at.rung == now:
            ended.append(run)
    later = range(now + 1, len(halving.rungs) + 1)
    if not ended and {*later} <= {*queued} and (now in queued or not _left(sweep, halving, now)):
        if freed:
            return []
        raise RunError(
            f"{sweep.name}: none of the runs ended without completing: see trnslurm status "
            f"{sweep.name}"
        )
    # They would start while this rung is resumed; they are submitted again, after it.
    scheduler.cancel_jobs([halving.rungs[n - 1].job for n in later if n in queued][::-1])
    for rung in range(now, len(halving.rungs)):
        ranking_file(sweep, rung).unlink(missing_ok=True)  # no run has gone on by it
    for run in ended:
        resume(run)
    left = [] if now in queued else _left(sweep, halving, now)
    jobs = {_array(run) for run in ended}
    others = {_array(run) for run in runs if _is_in(run, now)} - jobs
    others |= {halving.rungs[now - 1].job} if now in queued else set()
    after = sorted(jobs | {job for job in others if may_run(job, scheduler)}, key=int)
    if left:
        console.say(_submit_from(sweep, now, [], first, scheduler, tasks=left, also=after))
    elif later:
        console.say(_submit_from(sweep, now + 1, after, first, scheduler))
    return ended


def _array(run: RunDir) -> str:
    """Return the job that trains a run, or the array whose task it is."""
    return run.record().jobs[TRAIN].partition("_")[0]


def _is_in(run: RunDir, rung: int) -> bool:
    at = read_place(run)
    return at is not None and at.rung == rung


def _taken(sweep: Path, rung: int) -> set[int]:
    """Return the tasks of a rung that have already picked a run."""
    place = rung_place(sweep, rung)
    links = (path for path in place.iterdir() if path.is_symlink()) if place.is_dir() else ()
    return {int(path.name) for path in links}


def _left(sweep: Path, halving: Halving, rung: int) -> list[int]:
    """Return the tasks of a rung that have not picked a run yet, and would get one."""
    ranking = read_ranking(sweep, rung - 1) if rung > 1 else None
    most = min(halving.rungs[rung - 1].runs, len(ranking.order)) if ranking else 0
    return sorted({*range(1, most + 1)} - _taken(sweep, rung))
