"""pipeline: named stages, each a job that runs after the stages whose results it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trnslurm.api.arguments import (
    Paths,
    PythonConsole,
    SubmitArguments,
    one_line_errors,
    options_of,
    search_path,
    text,
    texts,
)
from trnslurm.api.run import Run, Runs
from trnslurm.config.pipeline import stages_in_order
from trnslurm.errors import ConfigError, did_you_mean
from trnslurm.runs.search import workspace_of
from trnslurm.runs.status import statuses_of
from trnslurm.submission.options import JobOptions
from trnslurm.submission.propose import Request, propose
from trnslurm.submission.stages import stage_of
from trnslurm.submission.submit import submit as start

_OF_A_STAGE = ("recipe", "nodes", "if", "after", "files")
_OF_ALL = ("cluster", "name", "path", "after")


@one_line_errors
def pipeline(
    name: str,
    stages: Mapping[str, Mapping[str, Any]],
    *,
    cluster: str | None = None,
    again: str | tuple[str, ...] = (),
    path: Paths = (),
) -> Runs:
    """Submit the stages of a pipeline that are not done, and return their runs.

    Each stage has the arguments of `submit`, plus `if`, `after` and `files`. See docs/pipelines.md.
    """
    console = PythonConsole(detach=True)
    where = f"pipeline {text('name', name)}"
    if not isinstance(stages, Mapping) or not stages:
        raise ConfigError(f"{where}: expected stages in the form {{NAME: {{'recipe': …}}}}")
    own = {
        str(n): _options_of(f"{where}: stages.{n}", each, cluster, path)
        for n, each in stages.items()
    }
    told = {
        stage: ((*o.arguments, *o.settings, *([o.from_run] if o.from_run else ())), stages[stage])
        for stage, o in own.items()
    }
    found = stages_in_order(where, told)
    request = Request(
        options=JobOptions(recipe="", workspace=workspace_of(search_path(path))),
        pipeline=name,
        stages=[stage_of(stage, own[stage.name], where) for stage in found],
        again=texts("again", again),
    )
    submission = propose(request, console)
    if not submission.runs:
        return Runs([], [])
    runs, _ = start(submission, ["python", f"trnslurm.pipeline({name!r}, …)"], console)
    statuses, _ = statuses_of(runs)
    return Runs(statuses, [Run._of(run, console.other_remarks, path) for run in runs])


def _options_of(where: str, values: object, cluster: str | None, path: Paths) -> JobOptions:
    if not isinstance(values, Mapping) or not isinstance(values.get("recipe"), str | os.PathLike):
        raise ConfigError(
            f"{where}: expected the stage's arguments, as in {{'recipe': './eval.py'}}"
        )
    known = [*_OF_A_STAGE, *(k for k in SubmitArguments.__annotations__ if k not in _OF_ALL)]
    for key in values:
        if key not in known:
            hint = did_you_mean(str(key), known) or f": the arguments are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown argument {key}{hint}")
    job = {k: v for k, v in values.items() if k not in _OF_A_STAGE}
    more = {"cluster": cluster, "path": path}
    return options_of(values["recipe"], values.get("nodes", 1), job | more)
