"""Report started runs, and follow them with a progress bar on a terminal, or line by line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from trnslurm.cli.output import echo_json, say
from trnslurm.cli.runs import echo_pipeline, echo_sweep, say_end
from trnslurm.console import Console
from trnslurm.contract.files import load_json
from trnslurm.contract.halving import read_halving
from trnslurm.contract.rundir import PREPARE
from trnslurm.contract.states import State
from trnslurm.records.run import Record, RunDir
from trnslurm.runs.explain import explained
from trnslurm.runs.halving import sweep_of
from trnslurm.runs.logs import choose_log, follow_log, print_log
from trnslurm.runs.pipeline import pipeline_of
from trnslurm.runs.standing import standing_of
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.runs.tables import ends_of, figure, format_values
from trnslurm.runs.watch import follow, once, once_each
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.submission.cancel import cancel

INTERRUPTED = 130
_STEP_POLL_S = 0.3


def report_started(runs: Sequence[RunDir], console: Console, extras: Sequence[RunDir] = ()) -> None:
    """Print runs and extras with their jobs, and follow the runs if the console asks for it."""
    if not runs:  # of a sweep that is resumed, only later rungs
        echo_json([])
        return
    record = runs[0].record()
    if console.as_json:
        facts = [_facts(run) for run in runs]
        facts[0] |= {"elastic": [_facts(run) for run in extras]} if extras else {}
        if record.group and (halving := read_halving(sweep_of(runs[0], record))):
            later = enumerate(halving.rungs[1:], 2)
            facts[0]["rungs"] = {str(number): rung.job for number, rung in later}
        echo_json(facts if len(facts) > 1 or record.group else facts[0])
    else:
        lines = []
        for run in (*runs, *extras):
            jobs = _facts(run)["jobs"].items()
            lines.append(f"Submitted {run.name}{''.join(f'  {name} {job}' for name, job in jobs)}")
        click.echo("\n".join(ends_of(lines)))
    if console.follow or (_ends_with_us(record) and not console.detach):
        sys.exit(_follow_all(runs, console))
    if not console.as_json:
        click.echo(f"See: trnslurm status {record.group or runs[0].name}")


def _ends_with_us(record: Record) -> bool:
    """Check whether a run ends when the command that follows it ends."""
    return bool(record.inside) or scheduler_of(record).is_here


def _facts(run: RunDir) -> dict[str, Any]:
    record = run.record()
    facts = {"run": run.name, "directory": str(run.path), "jobs": record.phase_jobs}
    kind = "pipeline" if record.stages else "sweep"
    return facts | ({kind: record.group, "values": record.values} if record.group else {})


def _follow_all(runs: Sequence[RunDir], console: Console) -> int:
    """Follow one run after another. In a chain, a failure ends the runs that are waiting for it."""
    worst = 0
    for number, run in enumerate(runs):
        record = run.record()
        if len(runs) > 1 and record.values and not record.stages:
            say(f"{run.name} with {format_values(record.values)}")
        code = _follow(run, console)
        worst = max(worst, code)
        if code == INTERRUPTED:
            for other in runs[:number:-1] if record.group and scheduler_of(record).is_here else ():
                cancel(other)
            break
    if len(runs) > 1 and runs[0].record().group and not console.as_json:
        click.echo()
        if runs[0].record().stages:
            echo_pipeline(pipeline_of(runs), console)
        else:
            echo_sweep(standing_of(runs), console)
    return worst


def _follow(run: RunDir, console: Console) -> int:
    """Show a run until it ends, and return the exit code."""
    record = run.record()
    try:
        if PREPARE in record.phases:
            status = _with_log(run)
        elif (record.inside or run.project_file.exists()) and not console.as_json:
            status = _with_node_log(run)
        else:
            # A custom script may never say how many steps it makes: no bar, then.
            steps = int(load_json(run.plan_file)["steps"] or 0)
            bar = steps and sys.stderr.isatty()
            status = _with_bar(run, steps) if bar else _with_lines(run)
    except KeyboardInterrupt:
        if not _ends_with_us(record):
            say(f"\n{run.name} is still running: trnslurm status {run.name}")
            return INTERRUPTED
        say("\nStopping …")
        status = _stop(run)
        say(f"{run.name}: {status.words}")
        if status.next:
            say(f"next: {status.next}")
        return INTERRUPTED
    if not console.as_json:
        _report(run, status)
    return 0 if status.state is State.COMPLETED else 1


def _stop(run: RunDir) -> RunStatus:
    """End a run. In a job that the user holds, it may first save, until Ctrl-C is pressed again."""
    try:
        cancel(run)
        *_, status = follow(run, _STEP_POLL_S)
    except KeyboardInterrupt:
        cancel(run, now=True)
        *_, status = follow(run, _STEP_POLL_S)
    return status


def _with_node_log(run: RunDir) -> RunStatus:
    """Show a run's states until it is running, and then the first node's output."""
    say_state = once_each(say)
    for status in follow(run):
        if status.final or status.state is State.RUNNING:
            break
        say_state(status, status.words)
    chunks = follow_log(lambda: choose_log(run), lambda: run_status(run).final, lines=None)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return run_status(run)


def _with_bar(run: RunDir, steps: int) -> RunStatus:
    bar: Any = click.progressbar(
        length=steps, label="waiting", file=sys.stderr, item_show_func=_figures, show_pos=True
    )
    with bar:
        for status in follow(run):
            bar.label = status.state.lower()
            # Epochs may make a run shorter than planned.
            bar.length = int(status.metrics.get("steps", steps))
            done = int(status.metrics.get("step", 0))
            bar.update(max(0, done - bar.pos), status.metrics)
            bar.render_progress()
    return status


def _with_lines(run: RunDir) -> RunStatus:
    say_state, printed_step = once_each(say), 0
    for status in follow(run):
        if not status.final:  # the end is reported below
            say_state(status, status.words)
        step, steps = int(status.metrics.get("step", 0)), int(status.metrics.get("steps", 0))
        if steps and (step - printed_step) * 10 >= steps:  # about ten lines for a whole run
            say(f"step {step}/{steps}  {_figures(status.metrics)}")
            printed_step = step
    return status


def _with_log(run: RunDir) -> RunStatus:
    """Show a run without steps: its states and the progress lines from its log."""
    say_state, say_line = once_each(say), once(say)
    for status in follow(run):
        if not status.final:
            say_state(status, status.words)
        if status.state in (State.RUNNING, State.COMPLETED):
            say_line(last_line(run))
    return status


def last_line(run: RunDir) -> str:
    """Return the last line of a run's log."""
    log = choose_log(run)
    return b"".join(print_log(log, 1)).decode(errors="replace").strip() if log else ""


def _figures(metrics: dict[str, Any] | Any | None) -> str:
    if not metrics:
        return ""
    known = []
    if "loss" in metrics:
        known.append(f"loss {figure(metrics['loss'], '.4f')}")
    if "tokens_per_s" in metrics:
        known.append(f"{figure(metrics['tokens_per_s'], ',.0f')} tokens/s")
    return "  ".join(known)


def _scores(metrics: Mapping[str, Any]) -> str:
    """Return the evaluation results after a step, if there was an evaluation."""
    found = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_")}
    found.pop("s", None)  # seconds of the evaluation
    return "  ".join(f"{name} {figure(value, '.4f')}" for name, value in found.items())


def _report(run: RunDir, status: RunStatus) -> None:
    status, found = explained(run, status)
    say_end(status, found)
    first, last = run.first_metrics(), status.metrics
    rate = last.get("tokens_per_s")
    if "loss" in first and "loss" in last:
        click.echo(
            f"loss {figure(first['loss'], '.4f')} at step {first['step']} -> "
            f"{figure(last['loss'], '.4f')} at step {last['step']}"
            + (f", {figure(rate, ',.0f')} tokens/s" if rate is not None else "")
        )
    if scores := _scores(last):
        click.echo(f"held out: {scores}")
    if status.state.failed:
        click.echo(f"logs: trnslurm logs {run.name}")
    click.echo(f"run directory: {run.path}")
