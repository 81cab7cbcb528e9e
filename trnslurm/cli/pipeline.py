"""Pipelines on the command line. Each stage accepts the options of submit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli.costs import graphs_lines, in_all, name_and_place
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.config.pipeline import StageText, read_pipeline
from trnslurm.errors import ConfigError
from trnslurm.runs.tables import count, ends_of, hours, text_table
from trnslurm.submission.options import JobOptions, SubmitHost
from trnslurm.submission.propose import Request, propose
from trnslurm.submission.stages import stage_of
from trnslurm.submission.submission import Submission

_OF_ALL = {"cluster", "path", "name"}
_OF_SUBMIT = {"recipe", "again", "dry_run", "yes", "follow", "detach", "as_json", *_OF_ALL}
_OF_A_STAGE = {field.name for field in fields(JobOptions)} - {"cluster", "name", "after"}
_OF_A_SWEEP = ("sweep", "sweep_file", "at_most", "halving")
_INSTEAD = {
    **dict.fromkeys(_OF_ALL, "pass it to submit"),
    **dict.fromkeys(_OF_A_SWEEP, "submit the sweep on its own, and pass the path of its best run"),
    "each_checkpoint_of": "submit the pipeline, then this command for the run of a stage",
    "chain": "submit the chain on its own, or make a stage of each preset",
    "after": "name stages in the key after",
}
"""What to do instead of setting an option in a stage."""


def pipeline_request(
    file: Path, options: Mapping[str, Any], again: tuple[str, ...], command: click.Command
) -> Request:
    """Return the request for the stages of a file, whose options `command` (submit) defines."""
    host = SubmitHost()
    context = click.get_current_context()
    _refuse_options(context, file)
    workspace, cluster = options["workspace"], options.get("cluster")
    pipeline = read_pipeline(file)
    stages = []
    for stage in pipeline.stages:
        where = f"{file}: stages.{stage.name}"
        own = _options_of(where, stage, command, workspace=workspace, cluster=cluster, host=host)
        stages.append(stage_of(stage, own, str(file)))
    return Request(
        options=JobOptions(recipe="", workspace=workspace, host=host),
        pipeline=options.get("name") or pipeline.name,
        stages=stages,
        again=again,
    )


def plan_pipeline(
    file: Path, options: Mapping[str, Any], console: Terminal, command: click.Command
) -> None:
    """Print what submit would do with the stages of a file."""
    submission = propose(pipeline_request(file, options, (), command), console)
    if console.as_json:
        echo_json({"pipeline": submission.pipeline, "stages": [*stages_of(submission)]})
        return
    for line in pipeline_lines(submission):
        click.echo(line)


def pipeline_lines(submission: Submission) -> Iterator[str]:
    """Yield what happens to each stage of a pipeline, and the cost of those that run."""
    stages = [*stages_of(submission)]
    yield from (f"{submission.pipeline}, {count(len(stages), 'stage')}:", "")
    header = ("stage", "after", "runs", "max node-hours", "rerun because")
    rows = [
        [
            each["stage"],
            ", ".join(each["after"]) or "-",
            f"done: {each['run']}" if each["done"] else each["what"],
            "-" if each["limit_node_hours"] is None else hours(each["limit_node_hours"]),
            each["why"],
        ]
        for each in stages
    ]
    shown = [n for n in range(len(header)) if n < 3 or any(row[n] not in ("", "-") for row in rows)]
    rows = [[row[n] for n in shown] for row in rows]
    yield from ends_of([*text_table([header[n] for n in shown], rows, right=header[3])])
    yield ""
    yield from dict.fromkeys(graphs_lines(submission))
    if submission.runs and submission.job.has_queue:
        yield in_all(submission)


def stages_of(submission: Submission) -> Iterator[dict[str, Any]]:
    """Yield the facts about each stage."""
    planned = {submission.name_of(run): run for run in submission.runs}
    stages = {run: stage for stage, run in submission.stages.items()}
    for stage, name in submission.stages.items():
        facts = {"stage": stage, "run": name, "done": name not in planned, "after": []}
        facts |= {"what": "", "nodes": None, "limit_node_hours": None, "why": ""}
        if (run := planned.get(name)) and run.need:
            facts |= {
                "after": [stages[each] for each in run.waits_for.success],
                "what": name_and_place(run.job),
                "nodes": run.job.nodes,
                "limit_node_hours": run.need.limit_node_hours if run.job.has_queue else None,
                "why": submission.why.get(stage, ""),
            }
        yield facts


def _options_of(where: str, stage: StageText, command: click.Command, **more: Any) -> JobOptions:
    """Return a stage's options, parsed as submit parses them."""
    try:
        context = command.make_context("submit", [*stage.words])
        given = [
            (option, str(option.name))
            for option in command.params
            if isinstance(option, click.Option)
            and context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
        ]
        for option, name in given:
            if name not in _OF_A_STAGE | {"module", "per"}:
                instead = _INSTEAD.get(name, "submit this command on its own")
                raise ConfigError(f"{where}: {option.opts[-1]} cannot be set in a stage: {instead}")
        values = {n: value for n, value in context.params.items() if n in _OF_A_STAGE}
        if context.params.get("sweep"):  # a batch script that is an array
            raise ConfigError(
                f"{where}: {stage.words[0]} is a job array, but a stage must be one job"
            )
    except click.ClickException as error:
        raise ConfigError(f"{where}: {error.format_message()}") from None
    return JobOptions(**values, **more)


def _refuse_options(context: click.Context, file: Path) -> None:
    for option in context.command.params:
        name, words = str(option.name), option.opts[-1]
        given = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if given and name not in _OF_SUBMIT:
            if name in _OF_A_STAGE:
                raise click.UsageError(f"{words} applies to one job: put it in a stage of {file}")
            raise click.UsageError(f"{words} does not work with a pipeline such as {file}")
