"""submit, sweep: start runs from a recipe, a reviewed bundle, or several values of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from trnslurm.api.arguments import (
    FIELD_OF,
    PathLike,
    PythonConsole,
    SubmitArguments,
    file_name,
    flag,
    options_of,
    settings_of,
    takes_job,
    whole,
    wholes,
)
from trnslurm.api.run import Run, Runs
from trnslurm.config.sweep import MOST_RUNS, Point, points_of
from trnslurm.errors import ConfigError
from trnslurm.records.run import RunDir
from trnslurm.runs.status import statuses_of
from trnslurm.submission.follow import Rule, check, follow
from trnslurm.submission.halving import parse_halving
from trnslurm.submission.propose import Request, propose
from trnslurm.submission.submit import submit as start


@takes_job(SubmitArguments)
def submit(
    recipe: PathLike | None = None,
    *,
    nodes: int | str = 1,
    rendered: PathLike | None = None,
    compile_for: int | Sequence[int] = (),
    elastic: int | Sequence[int] = (),
    chain: bool = False,
    in_job: str | int | None = None,
    **job: Unpack[SubmitArguments],
) -> Run:
    """Submit a recipe or a reviewed bundle, and return its run at once.

    The arguments are the options of `trnslurm submit`; see docs/python.md. The run continues
    without this process, even on the local cluster. For a chain, the first run is returned.
    """
    console = PythonConsole(detach=True)
    counts, chained = wholes("compile_for", compile_for), flag("chain", chain)
    if elastic:
        console.tell("warning: elastic has been renamed to compile_for")
        counts = counts or wholes("elastic", elastic)
    if (recipe is None) == (rendered is None):
        raise ConfigError("submit: pass either a recipe or rendered=DIR")
    options = options_of(recipe or "", nodes, job)
    asked = {k: getattr(options, FIELD_OF.get(k, k)) for k in job if k != "path"}
    asked |= {"compile_for": counts, "chain": chained, "nodes": options.nodes}
    if rendered is not None:
        if given := [k for k, v in asked.items() if v and (k, v) != ("nodes", 1)]:
            raise ConfigError(f"rendered: the files are submitted unchanged: omit {given[0]}")
        first = file_name("rendered", rendered)
    else:
        first = options.recipe
        if chained and counts:
            raise ConfigError("compile_for does not work with chain: omit one of them")
        if in_job is not None and (chained or counts or options.after):
            raise ConfigError("in_job starts a single run: omit after, chain and compile_for")
    request = Request(
        options=options,
        rendered=None if rendered is None else Path(first),
        chain=chained,
        compile_for=counts,
        holder=None if in_job is None else str(in_job),
    )
    submission = propose(request, console)
    if in_job is not None:
        asked["in_job"] = in_job
    words = [f"{k}={v!r}" for k, v in asked.items() if v]
    command = ["python", f"trnslurm.submit({', '.join([repr(first), *words])})"]
    runs, _ = start(submission, command, console)
    return Run._of(runs[0], console.other_remarks)


@takes_job(SubmitArguments)
def sweep(
    recipe: PathLike,
    values: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    nodes: int | str = 1,
    at_most: int | None = None,
    halving: int | str | None = None,
    lowest: str | None = None,
    highest: str | None = None,
    **job: Unpack[SubmitArguments],
) -> Runs:
    """Submit a run for each combination of values, or for each mapping in a list; return the runs.

    With `halving`, the worst runs stop early: pass 3, or "3:100" to set the steps of the first
    rung. The best run has the lowest or highest value of a metric. The other arguments are those of
    `submit`, for every run.
    """
    options = options_of(recipe, nodes, job)
    console = PythonConsole(detach=True)
    most = None if at_most is None else whole("at_most", at_most)
    if halving is None and (lowest or highest):
        raise ConfigError("lowest and highest require halving")
    rungs = None if halving is None else parse_halving(str(halving), lowest=lowest, highest=highest)
    request = Request(
        options=options, points=points_of([], _rows(values)), at_most=most, halving=rungs
    )
    submission = propose(request, console)
    more = f", halving={halving!r}" if halving else ""
    command = ["python", f"trnslurm.sweep({recipe!r}, {values!r}, nodes={nodes!r}{more})"]
    runs, _ = start(submission, command, console)
    statuses, _ = statuses_of(runs)
    return Runs(
        statuses, [Run._of(run, console.other_remarks, job.get("path", ())) for run in runs]
    )


@takes_job(SubmitArguments)
def each_checkpoint(
    run: PathLike | Run,
    recipe: PathLike,
    *,
    nodes: int | str = 1,
    every: int | None = None,
    at_most: int = 1,
    lowest: str = "",
    highest: str = "",
    patience: int | None = None,
    **job: Unpack[SubmitArguments],
) -> str:
    """Start a job for each checkpoint of a run, and return the name of these runs, for `runs`.

    The checkpoint with the `lowest` or `highest` value of a metric is kept. The run ends early when
    `patience` newer checkpoints are no better.

    The other arguments are those of `submit`, for every job. See docs/follow.md.
    """
    console = PythonConsole(detach=True)
    of = run if isinstance(run, Run) else Run(run, path=job.get("path", ()))
    steps = 0 if every is None else whole("every", every)
    rule = Rule.of(
        RunDir(of.directory),
        every=steps,
        at_most=whole("at_most", at_most),
        lowest=lowest,
        highest=highest,
        patience=0 if patience is None else whole("patience", patience),
    )
    options = replace(options_of(recipe, nodes, job), follows=of.name)
    submission = propose(Request(options=options), console)
    check(rule, submission)
    words = [f"{name}={value!r}" for name, value in job.items() if value and name != "path"]
    call = ", ".join([repr(of.name), repr(options.recipe), *words])
    place = follow(submission, rule, ["python", f"trnslurm.each_checkpoint({call})"])
    return f"{of.name}.{place.name}"


def _rows(values: object) -> list[Point]:
    """Return the points of a sweep, with Python values converted to strings as for --set."""
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
        f"values={values!r}: expected {{KEY: [VALUE, VALUE]}}, whose values are combined, or a "
        "list of {KEY: VALUE}, one per run"
    )
