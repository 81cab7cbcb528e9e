"""sweep: runs of one recipe that differ in some values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from trnslurm.api.arguments import PathLike, PythonConsole, settings_of, whole
from trnslurm.api.choice import choose_to_submit, spec_of
from trnslurm.api.options import JobOptions, SubmitArguments, options_of, takes_job
from trnslurm.api.run import Run, Runs
from trnslurm.api.submit import checked
from trnslurm.api.tables import format_values
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.sweep import MOST_RUNS, Point, points_of
from trnslurm.console import Console
from trnslurm.errors import ConfigError
from trnslurm.runs.status import statuses_of
from trnslurm.submit.job import Job, make_job
from trnslurm.submit.submission import PlannedRun, Submission, WaitsFor
from trnslurm.submit.submit import submit

_MOST_HERE = 50  # each waiting run has processes
_SHARED = ("run_root", "compile_cache", "scheduler")


def propose_sweep(
    options: JobOptions, points: Sequence[Point], at_most: int | None, console: Console
) -> Submission:
    """Return the checked runs of a sweep; at most `at_most` of them run at a time."""
    _refuse_set_twice(options, points)
    options = choose_to_submit(options, console)
    name = ""
    jobs: list[Job] = []
    for number, point in enumerate(points, 1):
        settings = [*options.settings, *(f"{key}={value}" for key, value in point.items())]
        spec = spec_of(replace(options, settings=settings), console, suffix=f"-{number}")
        name = options.name or spec.config.recipe_name
        code = jobs[0].bundle.files if jobs else {}
        code = {file: data for file, data in code.items() if file.startswith("code/")}
        jobs.append(make_job(spec, options.workspace.template_dirs(), code=code))
    _refuse_unlike(jobs, points)
    if jobs[0].local:
        if (at_most or 1) > 1:
            raise ConfigError(
                f"--at-most {at_most}: on this machine the runs of a sweep follow one another"
            )
        if len(jobs) > _MOST_HERE:
            raise ConfigError(
                f"the sweep has {len(jobs)} runs: at most {_MOST_HERE} on this machine"
            )
        at_most = 1
    names = [job.name for job in jobs]
    _, stamp = options.host.settle(jobs[0].profile.run_root, names)
    runs = []
    for number, (job, point) in enumerate(zip(jobs, points, strict=True)):
        end = f"{stamp}-{names[number - at_most]}" if at_most and number >= at_most else ""
        runs.append(PlannedRun(job=job, values=point, waits_for=WaitsFor(end=end)))
    submission = Submission(
        runs=runs, cache=CompileCache(jobs[0].profile), stamp=stamp, sweep=name, at_most=at_most
    )
    return checked(submission, options.host, console)


@takes_job(SubmitArguments)
def sweep(
    recipe: PathLike,
    values: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    nodes: int = 1,
    at_most: int | None = None,
    **job: Unpack[SubmitArguments],
) -> Runs:
    """Submit a run for each combination of values, or for each mapping in a list; return the runs.

    The other arguments are those of `submit`, for every run.
    """
    options = options_of(recipe, nodes, job)
    console = PythonConsole(detach=True)
    most = None if at_most is None else whole("at_most", at_most)
    submission = propose_sweep(options, points_of([], _rows(values)), most, console)
    command = ["python", f"trnslurm.sweep({recipe!r}, {values!r}, nodes={nodes!r})"]
    runs, _ = submit(submission, command, console)
    statuses, _ = statuses_of(runs)
    return Runs(
        statuses, [Run._of(run, console.other_remarks, job.get("path", ())) for run in runs]
    )


def _rows(values: object) -> list[Point]:
    """Return the points of a sweep; Python values become texts, as for --set."""
    if isinstance(values, Mapping):
        rows: list[dict[str, str]] = [{}]
        for key, each in values.items():
            if isinstance(each, str | Mapping) or not hasattr(each, "__iter__"):
                raise ConfigError(f"values: {key}={each!r}: expected a list of values")
            settings = [settings_of({key: value})[0].partition("=")[2] for value in each]
            rows = [{**row, key: setting} for row in rows for setting in settings][: MOST_RUNS + 1]
        if values and rows:
            return [*rows]
    elif isinstance(values, Sequence) and values and all(isinstance(v, Mapping) for v in values):
        pairs = [[word.partition("=") for word in settings_of(row)] for row in values]
        if all(pairs):
            return [{key: value for key, _, value in row} for row in pairs]
    raise ConfigError(
        f"values={values!r}: expected {{KEY: [VALUE, VALUE]}}, which are combined, or a list of "
        "{KEY: VALUE}, a run each"
    )


def _refuse_set_twice(options: JobOptions, points: Sequence[Point]) -> None:
    keys = {key for point in points for key in point}
    for key in (word.partition("=")[0] for word in options.settings):
        if key in keys:
            raise ConfigError(
                f"--sweep {key} and --set {key}=… contradict each other: leave out one of them"
            )


def _refuse_unlike(jobs: Sequence[Job], points: Sequence[Point]) -> None:
    """Refuse runs that differ in run root, compile cache or scheduler."""
    for job, point in zip(jobs, points, strict=True):
        for key in _SHARED:
            if getattr(job.profile, key) != getattr(jobs[0].profile, key):
                raise ConfigError(f"{format_values(point)}: all runs of a sweep have one {key}")
