"""Shows a run while it goes: a progress bar on a terminal, a line per change elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from trnslurm.cli.output import figure
from trnslurm.cli.triage import echo_finding
from trnslurm.plan.data import PREPARE
from trnslurm.runs.logs import choose_log, print_log
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, why_it_failed
from trnslurm.runs.watch import follow


def follow_run(run: RunDir, *, quiet: bool = False) -> RunStatus:
    """Show the run until it ends, and return its last status; quiet: say nothing on stdout."""
    if PREPARE in run.record().phases:
        status = _with_log(run)
    else:
        steps = int(json.loads(run.plan_file.read_text(encoding="utf-8"))["steps"])
        status = _with_bar(run, steps) if sys.stderr.isatty() else _with_lines(run)
    if not quiet:
        _report(run, status)
    return status


def _with_bar(run: RunDir, steps: int) -> RunStatus:
    last: RunStatus | None = None
    label = "waiting"
    with click.progressbar(
        length=steps, label=label, file=sys.stderr, item_show_func=_figures, show_pos=True
    ) as bar:
        for status in follow(run):
            last = status
            bar.label = status.state.lower()
            # A run may end before the plan's steps: after so many epochs, or where it shall stop.
            bar.length = int(status.metrics.get("steps", steps))
            done = int(status.metrics.get("step", 0))
            bar.update(max(0, done - bar.pos), status.metrics)
            bar.render_progress()
    assert last is not None
    return last


def _with_lines(run: RunDir) -> RunStatus:
    said, printed_step = "", 0
    last: RunStatus | None = None
    for status in follow(run):
        last = status
        said = _say_state(status, said)
        step, steps = int(status.metrics.get("step", 0)), int(status.metrics.get("steps", 0))
        if steps and (step - printed_step) * 10 >= steps:  # about ten lines for a whole run
            click.echo(f"step {step}/{steps}  {_figures(status.metrics)}", err=True)
            printed_step = step
    assert last is not None
    return last


def _with_log(run: RunDir) -> RunStatus:
    """Show the states of a run that has no steps, and what its log says of progress and result."""
    said, line_said = "", ""
    last: RunStatus | None = None
    for status in follow(run):
        last = status
        said = _say_state(status, said)
        line = _last_line(run)
        if line != line_said and status.state in ("RUNNING", "COMPLETED"):
            click.echo(line, err=True)
            line_said = line
    assert last is not None
    return last


def _say_state(status: RunStatus, said: str) -> str:
    """Say the state, unless it was said last or will be reported as the end."""
    word = f"{status.state}{f' ({status.reason})' if status.reason else ''}"
    if word != said and not status.final:
        click.echo(word, err=True)
    return word


def _last_line(run: RunDir) -> str:
    log = choose_log(run)
    return b"".join(print_log(log, 1)).decode(errors="replace").strip() if log else ""


def _figures(metrics: dict[str, Any] | Any | None) -> str:
    if not metrics:
        return ""
    loss = figure(metrics.get("loss"), ".4f")
    return f"loss {loss}  {figure(metrics.get('tokens_per_s'), ',.0f')} tokens/s"


def _scores(metrics: Mapping[str, Any]) -> str:
    """What the evaluation after a step came to, if there was one."""
    found = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_")}
    found.pop("s", None)  # the seconds that it took
    return "  ".join(f"{name} {figure(value, '.4f')}" for name, value in found.items())


def _report(run: RunDir, status: RunStatus) -> None:
    reason = f" ({status.reason})" if status.reason else ""
    click.echo(f"{run.name}: {status.state}{reason}")
    first, last = run.first_metrics(), status.metrics
    if "loss" in first and "loss" in last:
        click.echo(
            f"loss {figure(first['loss'], '.4f')} at step {first['step']} -> "
            f"{figure(last['loss'], '.4f')} at step {last['step']}, "
            f"{figure(last.get('tokens_per_s'), ',.0f')} tokens/s"
        )
    if scores := _scores(last):
        click.echo(f"held out: {scores}")
    if status.state in ("FAILED", "LOST", "NODE_FAIL"):
        if found := why_it_failed(run, status):
            echo_finding(found)
        click.echo(f"logs: trnslurm logs {run.name}")
    click.echo(f"run directory: {run.path}")
