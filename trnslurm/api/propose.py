"""Builds submissions: of a recipe, a chain of presets, a sweep or a reviewed bundle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm.api.chain import propose_chain
from trnslurm.api.choice import choose_to_submit, spec_of
from trnslurm.api.options import JobOptions, SubmitHost
from trnslurm.api.tables import format_values
from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.config.sweep import Point
from trnslurm.console import Console
from trnslurm.errors import ConfigError
from trnslurm.submit.here import check_here, check_notify
from trnslurm.submit.job import Job, make_job, read_job
from trnslurm.submit.precompile import precompile_jobs
from trnslurm.submit.submission import PlannedRun, Submission, WaitsFor, with_needs

_MOST_HERE = 50  # each waiting run has processes
_SHARED = ("run_root", "compile_cache", "scheduler")


def propose(options: JobOptions, console: Console, *, elastic: Sequence[int] = ()) -> Submission:
    """Return the run of a recipe, and runs that compile for the node counts of --elastic."""
    options = choose_to_submit(options, console)
    spec = spec_of(options, console)
    cache = CompileCache(spec.config.cluster)
    if PRECOMPILE in spec.phases and not options.host.remote:
        cache.ask_ahead()
    dirs = options.workspace.template_dirs()
    others = precompile_jobs(spec.config, spec, elastic, dirs) if elastic else []
    submission = Submission(
        runs=[PlannedRun(job=make_job(spec, dirs))],
        extras=[PlannedRun(job=job) for job in others],
        cache=cache,
    )
    return checked(submission, options.host, console)


def propose_presets(options: JobOptions, console: Console) -> Submission:
    """Return the runs of a chain of presets."""
    options = choose_to_submit(options, console)
    return checked(propose_chain(options, console), options.host, console)


def propose_bundle(directory: Path, host: SubmitHost, console: Console) -> Submission:
    """Return the run of a reviewed bundle, byte for byte."""
    job = read_job(directory)
    submission = Submission(runs=[PlannedRun(job=job)], cache=CompileCache(job.profile))
    return checked(submission, host, console)


def checked(submission: Submission, host: SubmitHost, console: Console) -> Submission:
    """Check that this host has what the jobs need, and find out which graphs are compiled.

    With --on the remote host does both, when it receives the submission.
    """
    if not host.remote:
        for planned in submission.runs:
            for warning in (*check_here(planned.job), *check_notify(planned.job)):
                console.warn(warning)
    if submission.cache.is_asking and not submission.job.local:
        importlib.import_module("trnslurm.submit.on_slurm")  # as slow as the check of the graphs
    return with_needs(submission, remote=host.remote)


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
