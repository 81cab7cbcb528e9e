"""Builds submissions from a recipe, a chain of presets, a sweep or a reviewed bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.config.recipes import chain_of
from trnslurm.config.sweep import Point
from trnslurm.console import Console
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import check_job_name, ends_unknown, fewer_nodes
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import format_values
from trnslurm.schedulers.interface import WaitsFor
from trnslurm.submission.choice import at_points, choose_to_submit, spec_of
from trnslurm.submission.halving import Asked, plan_rungs
from trnslurm.submission.here import check_here, check_notify, refuse_crowded
from trnslurm.submission.job import Job, make_job, read_job
from trnslurm.submission.options import JobOptions, SubmitHost
from trnslurm.submission.precompile import precompile_jobs
from trnslurm.submission.stages import Stage, plan_stages
from trnslurm.submission.submission import PlannedRun, Submission, with_needs

_MOST_HERE = 50  # each waiting run has processes
_SHARED = ("run_root", "compile_cache", "scheduler")


class Request(Frozen):
    """What a user asks to submit: a recipe, a chain or a sweep of it, or a reviewed bundle."""

    options: JobOptions
    rendered: Path | None = None
    """The directory of a reviewed bundle, which is submitted byte for byte."""
    chain: bool = False
    """Whether to also submit the presets that follow this preset."""
    points: Sequence[Point] = ()
    """The values of each run of a sweep."""
    at_most: int | None = None
    """How many runs of the sweep may run at a time."""
    halving: Asked | None = None
    """How the sweep stops runs before their last step, or None if it does not."""
    pipeline: str = ""
    """The name of a pipeline. The options then hold no job, only the workspace and the host."""
    stages: Sequence[Stage] = ()
    """The stages of the pipeline."""
    again: Sequence[str] = ()
    """Stages to run again even if they are done."""
    compile_for: Sequence[int] = ()
    """Additional node counts to compile for."""
    holder: str | None = None
    """The job that the user already holds, in which the run starts."""


def propose(request: Request, console: Console) -> Submission:
    """Return the runs that a request starts, checked as far as this host can."""
    options = request.options
    if request.rendered is not None:
        submission = _propose_bundle(request.rendered, options.host, console)
    elif request.stages:
        return _propose_pipeline(request, console)
    elif request.points:
        submission = _propose_sweep(
            options, request.points, request.at_most, console, request.halving
        )
    elif request.chain:
        submission = _propose_chain(options, console)
    else:
        held = request.holder is not None
        submission = _propose_run(options, console, request.compile_for, held=held)
    submission = _after(submission, options, console)
    if request.holder is None:
        return submission
    return _inside(submission, request.holder, options, console)


def _propose_run(
    options: JobOptions, console: Console, compile_for: Sequence[int], *, held: bool
) -> Submission:
    """Return the run of a recipe, and runs that compile for the node counts of --compile-for."""
    options = choose_to_submit(options, console)
    spec = spec_of(options, console, held=held)
    cache = CompileCache(spec.config.cluster)
    if PRECOMPILE in spec.phases and not options.host.remote:
        cache.ask_ahead()
    dirs = options.workspace.template_dirs()
    fewer = [each.nodes for each in fewer_nodes(spec)] if PRECOMPILE in spec.phases else []
    counts = sorted({*compile_for, *fewer})
    others = precompile_jobs(spec.config, spec, counts, dirs) if counts else []
    submission = Submission(
        runs=[PlannedRun(job=make_job(spec, dirs))],
        extras=[PlannedRun(job=job) for job in others],
        cache=cache,
    )
    return checked(submission, options.host, console)


def _propose_chain(options: JobOptions, console: Console) -> Submission:
    """Return the runs of a preset and the presets that follow it. Each starts from the previous."""
    options = choose_to_submit(options, console)
    chain = chain_of(options.workspace.source(options.recipe), options.preset)
    if len(chain) < 2:
        name = next(iter(chain), None)
        raise ConfigError(
            "--chain: no preset follows "
            f"{f'{options.recipe} ({name})' if name else options.recipe}: omit --chain, or write "
            "`then: PRESET` in the preset"
        )
    settings = _divide_settings(options.settings, chain)
    names = {preset: f"{options.name or options.recipe}-{preset}" for preset in chain}
    stages: list[Stage] = []
    for preset, before in zip(chain, ["", *chain], strict=False):
        own = replace(options, preset=preset, settings=settings[preset])
        stages.append(Stage(name=preset, options=own, continues=before))
    found = plan_stages(stages, names, console)
    cache = CompileCache(found.cluster)
    submission = Submission(runs=found.runs, cache=cache, stamp=found.stamp)
    return checked(submission, options.host, console)


def _propose_pipeline(request: Request, console: Console) -> Submission:
    """Return the runs of those stages of a pipeline that are not done."""
    name, host = request.pipeline, request.options.host
    known = [stage.name for stage in request.stages]
    for again in request.again:
        if again not in known:
            hint = did_you_mean(again, known) or f": the stages are {', '.join(known)}"
            raise ConfigError(f"--again {again}: there is no stage with that name{hint}")
    names = {stage: check_job_name(f"{name}-{stage}") for stage in known}
    found = plan_stages(request.stages, names, console, again=request.again)
    submission = Submission(
        runs=found.runs,
        cache=CompileCache(found.cluster),
        stamp=found.stamp,
        pipeline=name,
        stages=found.stages,
        why=found.why,
    )
    return checked(submission, host, console) if found.runs else submission


def _propose_bundle(directory: Path, host: SubmitHost, console: Console) -> Submission:
    """Return the run of a reviewed bundle, byte for byte."""
    job = read_job(directory)
    submission = Submission(runs=[PlannedRun(job=job)], cache=CompileCache(job.profile))
    return checked(submission, host, console)


def _inside(
    submission: Submission, holder: str, options: JobOptions, console: Console
) -> Submission:
    """Return a submission whose run starts in a job that the user already holds."""
    held = submission.job.scheduler.find_held(holder, submission.job)
    if options.time:
        console.warn(
            f"--time {options.time} does not limit the run in job {held.job_id}, which ends with "
            "that job. The limit applies to the job that trnslurm resume would submit"
        )
    return replace(submission, held=held, extras=())


def _after(submission: Submission, options: JobOptions, console: Console) -> Submission:
    """Return a submission whose runs wait for the run or the job given with --after."""
    if options.after is None:
        return submission
    from trnslurm.submission.after import find_dependency  # few submissions need it

    roots = run_roots(options.workspace)
    jobs = find_dependency(options.after, submission.job, roots, console)
    runs = [
        planned
        if planned.waits_for.success
        else replace(planned, waits_for=replace(planned.waits_for, jobs=jobs))
        for planned in submission.runs
    ]
    return replace(submission, runs=runs)


def checked(submission: Submission, host: SubmitHost, console: Console) -> Submission:
    """Check that this host has what the jobs need, and determine which graphs are compiled.

    With --on, the remote host does both when it receives the submission.
    """
    if not host.remote:
        for planned in submission.runs:
            if not console.yes:
                refuse_crowded(planned.job, anyway="--yes")
            for warning in (*check_here(planned.job, console.say), *check_notify(planned.job)):
                console.warn(warning)
    _warn_of_caps(submission, console)
    if submission.cache.is_asking:
        submission.job.scheduler.import_ahead()  # as slow as the check of the graphs
    return with_needs(submission, remote=host.remote)


def _warn_of_caps(submission: Submission, console: Console) -> None:
    """Warn if the runs are expected to use more than their caps allow."""
    jobs = [planned.job for planned in submission.runs]
    for together in [jobs] if submission.sweep else [[job] for job in jobs]:
        caps = together[0].caps
        needed = sum(job.estimate.node_hours if job.estimate else 0.0 for job in together)
        needed *= submission.halving.share if submission.halving else 1.0
        if "node_hours" in caps and needed > caps["node_hours"]:
            console.warn(
                f"{caps['key']} allows {caps['node_hours']:g} node-hours, but about {needed:.1f} "
                "are expected: the run will save and end before its last step"
            )


def _propose_sweep(
    options: JobOptions,
    points: Sequence[Point],
    at_most: int | None,
    console: Console,
    halving: Asked | None,
) -> Submission:
    """Return the checked runs of a sweep. At most `at_most` of them run at a time."""
    options = choose_to_submit(options, console)
    name = ""
    jobs: list[Job] = []
    unknown = False
    code: Mapping[str, bytes] = {}
    known: Mapping[str, str] = {}
    for number, own in enumerate(at_points(options, points), 1):
        spec = spec_of(own, console, suffix=f"-{number}")
        name = options.name or spec.config.recipe_name
        unknown = unknown or ends_unknown(spec.config)
        jobs.append(make_job(spec, options.workspace.template_dirs(), code=code, known=known))
        if not code:  # all runs have the same
            every, known = jobs[0].bundle.files, jobs[0].bundle.known
            code = {file: data for file, data in every.items() if file.startswith("code/")}
    _refuse_unlike(jobs, points)
    rungs = plan_rungs(halving, jobs, unknown=unknown) if halving else None
    if not jobs[0].has_queue:
        if len(jobs) > _MOST_HERE:
            raise ConfigError(
                f"the sweep has {len(jobs)} runs, but this machine can run at most {_MOST_HERE}"
            )
        at_most = 1
    names = [job.name for job in jobs]
    _, stamp = options.host.settle(jobs[0].profile.run_root, names)
    runs = []
    for number, (job, point) in enumerate(zip(jobs, points, strict=True)):
        end = f"{stamp}-{names[number - at_most]}" if at_most and number >= at_most else ""
        runs.append(PlannedRun(job=job, values=point, waits_for=WaitsFor(end=end)))
    submission = Submission(
        runs=runs,
        cache=CompileCache(jobs[0].profile),
        stamp=stamp,
        sweep=name,
        at_most=at_most,
        halving=rungs,
    )
    return checked(submission, options.host, console)


def _refuse_unlike(jobs: Sequence[Job], points: Sequence[Point]) -> None:
    """Reject runs that differ in their run root, compile cache or scheduler."""
    for job, point in zip(jobs, points, strict=True):
        for key in _SHARED:
            if getattr(job.profile, key) != getattr(jobs[0].profile, key):
                raise ConfigError(
                    f"{format_values(point)}: all runs of a sweep must have the same {key}"
                )


def _divide_settings(words: Sequence[str], chain: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the --set values for each preset, without those meant for others (PRESET:KEY=VALUE).

    For a key in which the presets differ, the setting must name its preset.
    """
    divided: dict[str, list[str]] = {name: [] for name in chain}
    for word in words:
        dotted, equals, value = word.partition("=")
        name, colon, key = dotted.partition(":")
        if colon and name not in chain:
            raise ConfigError(f"--set {word}: {name!r} is not in the chain {', '.join(chain)}")
        if not colon and len({repr(values.get(dotted)) for values in chain.values()}) > 1:
            choice = " or ".join(f"--set {name}:{dotted}=…" for name in chain)
            raise ConfigError(
                f"--set {word}: the chain's presets have different values of {dotted}: use {choice}"
            )
        for each in [name] if colon else chain:
            divided[each].append(f"{key}{equals}{value}" if colon else word)
    return divided
