"""Report started runs, and follow them with a progress bar on a terminal, else with lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from trnslurm.api.tables import figure, format_values
from trnslurm.cli.output import echo_json
from trnslurm.cli.standing import echo_sweep
from trnslurm.console import Console
from trnslurm.rundir import PREPARE, load_json
from trnslurm.runs.logs import choose_log, print_log
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, standing_of, why_it_failed
from trnslurm.runs.watch import follow
from trnslurm.submit.cancel import cancel

INTERRUPTED = 130


def report_started(runs: Sequence[RunDir], console: Console, extras: Sequence[RunDir] = ()) -> None:
    """Print runs and extras with their jobs; follow the runs if the console says so."""
    local = runs[0].record().scheduler == "local"
    group = runs[0].record().group
    if console.as_json:
        facts = [_facts(run, local=local) for run in runs]
        facts[0] |= {"elastic": [_facts(run, local=local) for run in extras]} if extras else {}
        echo_json(facts if len(facts) > 1 or group else facts[0])
    else:
        for run in (*runs, *extras):
            jobs = _facts(run, local=local)["jobs"].items()
            click.echo(f"Submitted {run.name}{''.join(f'  {phase} {job}' for phase, job in jobs)}")
    if console.follow or (local and not console.detach):
        sys.exit(_follow_all(runs, local=local, quiet=console.as_json))
    if not console.as_json:
        click.echo(f"See: trnslurm status {group or runs[0].name}")


def _facts(run: RunDir, *, local: bool) -> dict[str, Any]:
    record = run.record()
    facts = {"run": run.name, "directory": str(run.path), "jobs": {} if local else {**record.jobs}}
    return facts | ({"sweep": record.group, "values": record.values} if record.group else {})


def _follow_all(runs: Sequence[RunDir], *, local: bool, quiet: bool) -> int:
    """Follow one run after another; in a chain, a failure ends the runs that wait for it."""
    worst = 0
    for number, run in enumerate(runs):
        if len(runs) > 1 and (values := run.record().values):
            click.echo(f"{run.name} with {format_values(values)}", err=True)
        code = _follow(run, local=local, quiet=quiet)
        worst = max(worst, code)
        if code == INTERRUPTED:
            for other in runs[:number:-1] if local and run.record().group else ():
                cancel(other)
            break
    if len(runs) > 1 and runs[0].record().group and not quiet:
        click.echo()
        echo_sweep(standing_of(runs))
    return worst


def _follow(run: RunDir, *, local: bool, quiet: bool) -> int:
    try:
        status = follow_run(run, quiet=quiet)
    except KeyboardInterrupt:
        if not local:
            click.echo(f"\n{run.name} continues: trnslurm status {run.name}", err=True)
            return INTERRUPTED
        click.echo("\nStopping …", err=True)
        cancel(run)
        click.echo(f"{run.name}: CANCELLED", err=True)
        return INTERRUPTED
    return 0 if status.state == "COMPLETED" else 1


def follow_run(run: RunDir, *, quiet: bool = False) -> RunStatus:
    """Show a run until it ends and return its last status; quiet: print nothing on stdout."""
    if PREPARE in run.record().phases:
        status = _with_log(run)
    else:
        steps = int(load_json(run.plan_file)["steps"])
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
            # Epochs may make a run shorter than planned.
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
        said = say_state(status, said)
        step, steps = int(status.metrics.get("step", 0)), int(status.metrics.get("steps", 0))
        if steps and (step - printed_step) * 10 >= steps:  # about ten lines for a whole run
            click.echo(f"step {step}/{steps}  {_figures(status.metrics)}", err=True)
            printed_step = step
    assert last is not None
    return last


def _with_log(run: RunDir) -> RunStatus:
    """Show a run without steps: its states, and the progress lines in its log."""
    said, line_said = "", ""
    last: RunStatus | None = None
    for status in follow(run):
        last = status
        said = say_state(status, said)
        line = last_line(run)
        if line != line_said and status.state in ("RUNNING", "COMPLETED"):
            click.echo(line, err=True)
            line_said = line
    assert last is not None
    return last


def say_state(status: RunStatus, said: str) -> str:
    """Print the state, unless it is unchanged or final (reported at the end)."""
    if status.words != said and not status.final:
        click.echo(status.words, err=True)
    return status.words


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
    """Return the results of the evaluation after a step, if there was one."""
    found = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_")}
    found.pop("s", None)  # seconds of the evaluation
    return "  ".join(f"{name} {figure(value, '.4f')}" for name, value in found.items())


def _report(run: RunDir, status: RunStatus) -> None:
    click.echo(f"{run.name}: {status.words}")
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
    if status.state in ("FAILED", "LOST", "NODE_FAIL"):
        if found := why_it_failed(run, status):
            from trnslurm.cli.triage import echo_finding

            echo_finding(found)
        click.echo(f"logs: trnslurm logs {run.name}")
    if status.state == "COMPLETED" and status.mend:
        click.echo(f"next: {status.mend}")
    click.echo(f"run directory: {run.path}")
