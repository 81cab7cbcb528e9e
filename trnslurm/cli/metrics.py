"""metrics: the numbers of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.api.tables import figure
from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.errors import RunError
from trnslurm.runs.find import find_runs
from trnslurm.runs.run import RunDir

_COLUMNS = {
    "step": "d", "attempt": "d", "loss": ".4f", "grad_norm": ".4f", "lr": ".3g",
    "samples_per_s": ".1f", "step_s": ".3f", "eval_loss": ".4f",
}  # fmt: skip
_MOST_OWN = 5


@click.command("metrics")
@run_argument
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), default=20, show_default=True, metavar="N",
    help="Show only the last N steps.",
)  # fmt: skip
@path_option
@json_option
def metrics_command(run: str, lines: int, path: tuple[str, ...], as_json: bool) -> None:
    """Print the numbers of each step, or of each run of a sweep.

    What a later attempt has done again is left out, so that every step is there once. --json prints
    all steps and all numbers.

    \b
    Example:
      trnslurm metrics last
      trnslurm metrics last --json > steps.json
    """
    directory, *others = runs = find_runs(run, run_roots(workspace_of({"path": path})))
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
            how = "; a script of one's own tells them by trnslurm.report(), see docs/scripts.md"
        raise RunError(f"{directory.name} has told no steps: trnslurm status {directory.name}{how}")
    columns = _columns(directory, steps, steps[-lines:])
    rows = [[figure(s.get(name), form) for name, form in columns.items()] for s in steps[-lines:]]
    echo_table(list(columns), rows, right=",".join(columns))


def _metrics_of_sweep(runs: Sequence[RunDir], *, as_json: bool) -> None:
    """Print the last numbers of each run of a sweep; as JSON all, by its name."""
    steps = {run.name: run.steps() for run in runs}
    if as_json:
        echo_json(steps)
        return
    # What is said now and then, such as held-out numbers, is what was said last.
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
    """Return the numbers to show, and how each is written."""
    columns = {name: form for name, form in _COLUMNS.items() if any(name in s for s in steps)}
    if run.project_file.exists():  # a script of one's own names its numbers itself
        known = {*columns, "steps", "time"}
        more = {name: ".4g" for step in shown for name in step if name not in known}
        columns |= dict(list(more.items())[:_MOST_OWN])
    return columns
