"""metrics: the numbers of each step."""

from __future__ import annotations

import click

from trnslurm.api.choice import run_roots, workspace_of
from trnslurm.api.tables import figure
from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.errors import RunError
from trnslurm.runs.find import find_run

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
    """Print the numbers of each step, once per step.

    What a later attempt has done again is left out, so that every step is there once. --json prints
    all steps and all numbers.

    \b
    Example:
      trnslurm metrics last
      trnslurm metrics last --json > steps.json
    """
    directory = find_run(run, run_roots(workspace_of({"path": path})))
    steps = directory.steps()
    if as_json:
        echo_json(steps)
        return
    if not steps:
        raise RunError(f"{directory.name} has no steps yet: trnslurm status {directory.name}")
    columns = {name: form for name, form in _COLUMNS.items() if any(name in s for s in steps)}
    if directory.project_file.exists():  # a script of one's own names its numbers itself
        known = {*columns, "steps", "time"}
        more = {name: ".4g" for step in steps[-lines:] for name in step if name not in known}
        columns |= dict(list(more.items())[:_MOST_OWN])
    rows = [[figure(s.get(name), form) for name, form in columns.items()] for s in steps[-lines:]]
    echo_table(list(columns), rows, right=",".join(columns))
