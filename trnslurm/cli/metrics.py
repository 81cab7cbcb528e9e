"""metrics: the numbers of each step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.api.curve import curve_lines
from trnslurm.api.search import run_roots, workspace_of
from trnslurm.api.tables import figure
from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.errors import RunError, did_you_mean
from trnslurm.runs.find import find_runs
from trnslurm.runs.foreign import printable
from trnslurm.runs.run import RunDir

_COLUMNS = {
    "step": "d",
    "attempt": "d",
    "loss": ".4f",
    "grad_norm": ".4f",
    "lr": ".3g",
    "samples_per_s": ".1f",
    "step_s": ".3f",
    "eval_loss": ".4f",
}
_MOST_OWN = 5
_WIDEST = 120


@click.command("metrics")
@run_argument
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Show only the last N steps.",
)
@click.option(
    "--plot",
    is_flag=False,
    flag_value="loss",
    metavar="[KEY]",
    help="Draw a number over all steps, or the last N.  [default: loss]",
)
@click.option(
    "--to", type=click.Choice(["wandb", "mlflow"]), help="Send what is new to this tracker."
)
@click.option("--project", metavar="NAME", help="Project there.  [default: the recipe]")
@click.option("-f", "--follow", is_flag=True, help="With --to: until the run has ended.")
@path_option
@json_option
def metrics_command(
    run: str,
    lines: int,
    plot: str | None,
    to: str | None,
    project: str | None,
    follow: bool,
    path: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print, draw or send the numbers of each step, or of a sweep's runs.

    Steps that a later attempt repeated are shown once. --json prints
    all steps and all numbers.

    --to sends them to Weights & Biases or MLflow, each step once, however often it is called.

    \b
    Example:
      trnslurm metrics last
      trnslurm metrics last --json > steps.json
      trnslurm metrics last --plot grad_norm
      trnslurm metrics last --to wandb --follow
    """
    _refuse_both({"--plot": plot, "--to": to, "--json": as_json})
    if (project or follow) and not to:
        raise click.UsageError(f"{'--project' if project else '--follow'} is for --to")
    directory, *others = runs = find_runs(run, run_roots(workspace_of(path)))
    if to:
        from trnslurm.trackers.send import send  # only --to needs this import

        if others and follow:
            raise click.UsageError("--follow is for one run, and these are several")
        for each in runs:
            send(each, to, project, say=click.echo, follows=follow)
        return
    if plot:
        if others:
            raise click.UsageError(f"--plot draws one run: trnslurm report {run} has them all")
        _plot(directory, plot, lines if _given("lines") else None)
        return
    if others:
        _metrics_of_sweep(runs, as_json=as_json)
        return
    steps = directory.steps()
    if as_json:
        echo_json(steps)
        return
    if not steps:
        how = ""
        if directory.project_file.exists():
            how = "; a custom script reports them by trnslurm.report(), see docs/scripts.md"
        raise RunError(f"{directory.name} has told no steps: trnslurm status {directory.name}{how}")
    columns = _columns(directory, steps, steps[-lines:])
    rows = [[figure(s.get(name), form) for name, form in columns.items()] for s in steps[-lines:]]
    echo_table(list(columns), rows, right=",".join(columns))


def _refuse_both(options: Mapping[str, object]) -> None:
    if len(asked := [name for name, value in options.items() if value]) > 1:
        raise click.UsageError(f"{asked[1]} does not work with {asked[0]}: leave out one of them")


def _given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is ParameterSource.COMMANDLINE


def _plot(run: RunDir, key: str, lines: int | None) -> None:
    """Draw a metric over the steps; marks show where attempts begin."""
    steps = run.steps()
    told = [s for s in steps if _is_finite(s.get(key))][-(lines or 0) :]
    if not told:
        known = dict.fromkeys(name for s in steps for name in s if _is_finite(s[name]))
        hint = did_you_mean(key, known) or (f"; it has {', '.join(known)}" if known else "")
        raise RunError(f"{run.name} has no number {printable(key)}{hint}")
    first = told[0]["step"]
    begun = [b["step"] for a, b in pairwise(steps) if a["attempt"] != b["attempt"]]
    points = [(float(s["step"]), float(s[key])) for s in told]
    for line in curve_lines(
        points,
        title=f"{key} of {run.name}, last {points[-1][1]:.4g}",
        width=min(shutil.get_terminal_size().columns, _WIDEST),
        marks=[step for step in begun if first <= step <= told[-1]["step"]],
        marked="resumed",
    ):
        click.echo(line)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _metrics_of_sweep(runs: Sequence[RunDir], *, as_json: bool) -> None:
    """Print the latest metrics of each run of a sweep; as JSON all steps, by run name."""
    steps = {run.name: run.steps() for run in runs}
    if as_json:
        echo_json(steps)
        return
    # Metrics that are not in every step, such as held-out ones, have their latest value.
    last = [{k: v for step in each for k, v in step.items()} for each in steps.values()]
    columns = _columns(runs[0], last, last)
    rows = [
        [name, *(figure(numbers.get(column), form) for column, form in columns.items())]
        for name, numbers in zip(steps, last, strict=True)
    ]
    echo_table(["run", *columns], rows, right=",".join(columns))


def _columns(
    run: RunDir, steps: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Return the metrics to show, and the format of each."""
    columns = {name: form for name, form in _COLUMNS.items() if any(name in s for s in steps)}
    if run.project_file.exists():  # a custom script chooses its metrics' names
        known = {*columns, "steps", "time"}
        more = {name: ".4g" for step in shown for name in step if name not in known}
        columns |= dict(list(more.items())[:_MOST_OWN])
    return columns
