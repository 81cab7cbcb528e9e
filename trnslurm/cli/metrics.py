"""metrics: the metrics of each step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click
from click.core import ParameterSource

from trnslurm.cli import completer
from trnslurm.cli.options import json_option, path_option, refuse_pairs, run_or_sweep_argument
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.contract.metrics import READ
from trnslurm.errors import RunError, did_you_mean
from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir, is_number
from trnslurm.runs.silence import no_steps
from trnslurm.runs.status import run_status
from trnslurm.runs.tables import figure

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
# A curve is drawn in braille: each character has two by four dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ROWS = 16
_LEAST_WIDTH = 20
Points = Sequence[tuple[float, float]]
"""Pairs of step and value, in step order."""


@click.command("metrics")
@run_or_sweep_argument
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=1),
    default=20,
    metavar="N",
    help="Show only the last N steps.",
)
@click.option(
    "--plot",
    is_flag=False,
    flag_value="loss",
    metavar="[KEY]",
    help="Draw a metric over all steps, or the last N.  [default: loss]",
)
@click.option(
    "--to",
    metavar="TRACKER",
    shell_complete=completer("tracker"),
    help="Send new steps to wandb, mlflow, or a plug-in's tracker.",
)
@click.option(
    "--project", metavar="NAME", help="With --to: project in the tracker.  [default: the recipe]"
)
@click.option(
    "-f", "--follow", is_flag=True, help="With --to: keep sending until the run has ended."
)
@path_option
@json_option
def metrics_command(
    runs: Sequence[RunDir],
    lines: int,
    plot: str | None,
    to: str | None,
    project: str | None,
    console: Terminal,
) -> None:
    """Print, plot or send the metrics of each step, or of a sweep's runs.

    Steps that a later attempt repeated are shown once. --json prints all steps and all metrics.

    --to sends them to Weights & Biases, MLflow or a plug-in's tracker. Each step is sent only once,
    even if you repeat the command.

    \b
    Example:
      trnslurm metrics last
      trnslurm metrics last --json > steps.json
      trnslurm metrics last --plot grad_norm
      trnslurm metrics last --to wandb --follow
    """
    refuse_pairs({"--plot": plot, "--to": to, "--json": console.as_json})
    if (project or console.follow) and not to:
        raise click.UsageError(f"{'--project' if project else '--follow'} requires --to")
    first, *others = runs
    if to:
        from trnslurm.trackers.send import send  # only --to needs this import

        if others and console.follow:
            raise click.UsageError("--follow works with only one run")
        for each in runs:
            send(each, to, project, say=click.echo, follows=console.follow)
    elif plot and others:
        group = first.record().group
        raise click.UsageError(
            f"--plot draws only one run: use trnslurm report {group} to draw all"
        )
    elif plot:
        _plot(first, plot, lines if _given("lines") else None)
    elif others:
        _metrics_of_sweep(runs, console)
    elif console.as_json:
        echo_json(first.steps())
    else:
        _metrics_of_run(first, lines)


def _metrics_of_run(run: RunDir, lines: int) -> None:
    steps = run.last_steps(lines)
    if not steps:
        raise RunError(no_steps(run_status(run)))
    columns = _columns(run, steps, steps[-lines:])
    rows = [[figure(s.get(name), form) for name, form in columns.items()] for s in steps[-lines:]]
    echo_table(list(columns), rows, right=",".join(columns))


def _given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is ParameterSource.COMMANDLINE


def _plot(run: RunDir, key: str, lines: int | None) -> None:
    """Draw a metric over the steps, with marks where attempts begin."""
    steps = run.steps()
    if not steps:
        raise RunError(no_steps(run_status(run)))
    drawn = [s for s in steps if _is_finite(s.get(key))][-(lines or 0) :]
    if not drawn:
        known = dict.fromkeys(name for s in steps for name in s if _is_finite(s[name]))
        hint = did_you_mean(key, known) or (f"; it has {', '.join(known)}" if known else "")
        raise RunError(f"{run.name} has no metric {printable(key)}{hint}")
    first = drawn[0]["step"]
    begun = [b["step"] for a, b in pairwise(steps) if a["attempt"] != b["attempt"]]
    points = [(float(s["step"]), float(s[key])) for s in drawn]
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    marks = [step for step in begun if first <= step <= drawn[-1]["step"]]
    click.echo(f"{key} of {run.name}, last {points[-1][1]:.4g}")
    for line in _curve_lines(points, width, marks):
        click.echo(line)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _metrics_of_sweep(runs: Sequence[RunDir], console: Terminal) -> None:
    """Print the latest metrics of each run of a sweep, or all steps by run name as JSON."""
    steps = {run.name: run.steps() for run in runs}
    if console.as_json:
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
    """Return the metrics to show and their formats."""
    columns = {name: form for name, form in _COLUMNS.items() if any(name in s for s in steps)}
    # A custom script chooses its metrics' names, and so do jobs that follow its checkpoints.
    known, custom = {*columns, "steps", "time", READ}, run.project_file.exists()
    names = (name for step in shown for name in step if custom or "/" in name)
    more = {name: ".4g" for name in names if name not in known}
    return columns | dict(list(more.items())[:_MOST_OWN])


def _curve_lines(points: Points, width: int, marks: Sequence[float]) -> list[str]:
    """Return the lines of a curve with axes, `width` characters wide, marking the steps in `marks`.

    If there are more steps than columns, each column shows the range of its steps.
    """
    values = [value for _, value in points]
    low, high = min(values), max(values)
    first, last = points[0][0], points[-1][0]
    labelled = {0: high, _ROWS // 2: (low + high) / 2, _ROWS - 1: low}
    labels = {row: f"{value:.4g}" for row, value in labelled.items()}
    margin = max(map(len, labels.values())) + 1
    columns = max(_LEAST_WIDTH, width - margin - 1)
    across, down = 2 * columns - 1, 4 * _ROWS - 1

    def x_of(step: float) -> int:
        return round((step - first) / ((last - first) or 1) * across)

    def y_of(value: float) -> int:
        return round((high - value) / ((high - low) or 1) * down) if high > low else down // 2

    cells = [[0] * columns for _ in range(_ROWS)]
    before = (x_of(first), y_of(values[0]))
    for step, value in points:
        here = (x_of(step), y_of(value))
        for x, y in _between(before, here):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        before = here
    axis = ["─"] * columns
    for step in marks:
        axis[x_of(step) // 2] = "┼"
    lines = []
    for row, cell in enumerate(cells):
        dots = "".join(chr(0x2800 + bits) if bits else " " for bits in cell).rstrip()
        lines.append(f"{labels.get(row, ''):>{margin - 1}} {'┤' if row in labels else '│'}{dots}")
    lines.append(f"{'':>{margin}}└{''.join(axis)}")
    middle = f"step {(first + last) / 2:.0f}" if last - first > 1 else ""
    begin, end = f"{first:.0f}", f"{last:.0f}"
    gap = columns - len(begin) - len(end)
    lines.append(f"{'':>{margin + 1}}{begin}{middle:^{gap}}{end}".rstrip())
    return [*lines, f"{'':>{margin + 1}}┼ resumed"] if marks else lines


def _between(one: tuple[int, int], other: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Return the dots on the line between two dots."""
    (x0, y0), (x1, y1) = one, other
    steps = max(abs(x1 - x0), abs(y1 - y0)) or 1
    return [
        (round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps))
        for n in range(steps + 1)
    ]
