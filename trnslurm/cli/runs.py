"""runs, status, logs, cancel, exec: commands for submitted runs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from trnslurm.api.amounts import parse_time
from trnslurm.api.listing import latest_metrics, list_statuses
from trnslurm.api.run import RIGHT, progress, runs_table
from trnslurm.api.search import run_roots, workspace_of
from trnslurm.api.tables import count, figure, format_values
from trnslurm.cli.options import json_option, path_option, run_argument, sweep_argument
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.cli.standing import echo_sweep
from trnslurm.node.hosts import brief
from trnslurm.runs.find import find_run, find_runs
from trnslurm.runs.logs import choose_log, follow_log, log_of, print_log
from trnslurm.runs.phase import STATES
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, run_status, standing_of, why_it_failed

_SHOWN_ATTEMPTS = 5


def _runs(word: str, path: tuple[str, ...]) -> list[RunDir]:
    return find_runs(word, run_roots(workspace_of(path)))


def _run(word: str, path: tuple[str, ...]) -> RunDir:
    return find_run(word, run_roots(workspace_of(path)))


@click.command("runs")
@sweep_argument
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Show all runs, not only the newest 20."
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES, case_sensitive=False),
    help="Show only runs in this state; repeat for several states.",
)
@click.option("--recipe", metavar="NAME", help="Show only runs of this recipe.")
@click.option(
    "--since", metavar="TIME", help="Show only runs submitted since TIME: 12h, 30d, 2026-11-21."
)
@click.option("--sort", metavar="METRIC", help="Sort by the latest value of METRIC, lowest first.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Show at most N of these runs."
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV, with the latest value of every metric."
)
@path_option
@json_option
def runs_command(
    sweep: str | None,
    everything: bool,
    states: tuple[str, ...],
    recipe: str | None,
    since: str | None,
    sort: str | None,
    limit: int | None,
    as_csv: bool,
    path: tuple[str, ...],
    as_json: bool,
) -> None:
    """List runs, or the runs of one sweep, with their states, newest last.

    A selection by state, recipe, time or metric looks at all runs.

    \b
    Example:
      trnslurm runs
      trnslurm runs 20261123-113000-gpt2_zero1
      trnslurm runs --state FAILED --state LOST --since 7d
      trnslurm runs --recipe gpt2_zero1 --sort eval_loss --limit 5 --csv
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json: give one of them")
    statuses, broken = list_statuses(
        workspace_of(path),
        sweep,
        everything=everything,
        states=states,
        recipe=recipe,
        since="" if since is None else parse_time(since),
        sort=sort,
        limit=limit,
    )
    for error in broken:
        click.echo(f"warning: {error}", err=True)
    if as_json:
        echo_json([asdict(status) for status in statuses])
        return
    if as_csv:
        _echo_csv(statuses)
        return
    if not statuses:
        chosen = states or recipe or since or sort
        nothing = (
            "No run matches" if chosen else "No runs yet: trnslurm submit gpt2_zero1 --nodes 2"
        )
        click.echo(nothing, err=True)
        return
    header, rows = runs_table(statuses, values=sweep is not None)
    if sort is not None and sort not in header:
        header = [*header[:-1], sort, header[-1]]
        told = [figure(latest_metrics(status).get(sort), ".5g") for status in statuses]
        rows = [[*row[:-1], value, row[-1]] for row, value in zip(rows, told, strict=True)]
    if any(status.note for status in statuses):
        header = [*header, "note"]
        rows = [[*row, status.note] for row, status in zip(rows, statuses, strict=True)]
    echo_table(header, rows, right=f"{RIGHT},{sort}")


def _echo_csv(statuses: Sequence[RunStatus]) -> None:
    """Print runs with the latest value of every metric."""
    columns = (
        "run",
        "state",
        "recipe",
        "preset",
        "cluster",
        "nodes",
        "created",
        "group",
        "note",
        "reason",
    )
    numbers = [latest_metrics(status) for status in statuses]
    more = list(dict.fromkeys(name for each in numbers for name in each))
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow([*columns, "step", "steps", *more])
    for status, said in zip(statuses, numbers, strict=True):
        steps = [status.metrics.get(name) for name in ("step", "steps")]
        told = [getattr(status, name) for name in columns]
        out.writerow([*told, *steps, *(said.get(name) for name in more)])


@click.command("status")
@run_argument
@click.option("--lowest", metavar="METRIC", help="For a sweep: the best has the lowest METRIC.")
@click.option("--highest", metavar="METRIC", help="For a sweep: the best has the highest METRIC.")
@path_option
@json_option
def status_command(
    run: str, lowest: str | None, highest: str | None, path: tuple[str, ...], as_json: bool
) -> None:
    """Show the state of a run or a sweep, and why.

    The state of a run is one word. The best run of a sweep has the lowest latest held-out loss, or
    the lowest latest loss where nothing is held out.

    \b
    Example:
      trnslurm status last
      trnslurm status 20261123-113000-bert_mrpc --highest eval_f1
    """
    directory, *others = runs = _runs(run, path)
    if others:
        echo_sweep(standing_of(runs, lowest=lowest, highest=highest), as_json=as_json)
        return
    if lowest or highest:
        raise click.UsageError("--lowest and --highest compare the runs of a sweep")
    status = run_status(directory, leftovers=True)
    found = why_it_failed(directory, status)
    if as_json:
        echo_json({**asdict(status), "failure": asdict(found) if found else None})
        return
    click.echo(f"{status.run}: {status.words}")
    preset = f" ({status.preset})" if status.preset else ""
    click.echo(f"{status.recipe}{preset} on {count(status.nodes, 'node')} of {status.cluster}\n")
    header = ("phase", "state", "job", "attempt", "started", "ended", "hosts", "reason")
    rows = [
        (
            p.phase,
            p.state,
            p.job_id or "-",
            str(p.attempt or "-"),
            p.started or "-",
            p.ended or "-",
            brief(p.hosts.split(",")) or "-",
            p.reason,
        )
        for p in status.phases
    ]
    echo_table(header, rows)
    click.echo()
    if left_out := status.precompile.get("left_out"):
        click.echo(f"no precompile job: {left_out}")
    elif key := status.precompile.get("key"):
        click.echo(f"key of its graphs: {key}")
    _say_chain(status)
    if "step" in status.metrics:
        step, loss = progress(status)
        click.echo(f"step {step}, loss {loss}")
    _say_attempts(status)
    if found:
        from trnslurm.cli.triage import echo_finding  # needed for failed runs only

        echo_finding(found)
    if status.mend:
        click.echo(f"next: {status.mend}")
    if status.note:
        click.echo(f"note: {status.note}")
    if status.kept:
        click.echo("protected: trnslurm rm does not remove it")
    click.echo(f"run directory: {status.path}")


def _say_chain(status: RunStatus) -> None:
    """Print the previous and the next run of its chain, or its sweep."""
    if status.group:
        click.echo(f"in the sweep {status.group}, with {format_values(status.values)}")
    if status.after:
        click.echo(f"starts from the result of {status.after}")
    if status.then:
        click.echo(f"{status.then} starts from its result")


def _say_attempts(status: RunStatus) -> None:
    """Print the number of attempts, and how the latest ended."""
    if len(status.attempts) > 1:
        ends = [f"{a.attempt} {a.state}{a.reason and f' ({a.reason})'}" for a in status.attempts]
        more = "… " if len(ends) > _SHOWN_ATTEMPTS else ""
        click.echo(f"attempts: {len(ends)}: {more}{', '.join(ends[-_SHOWN_ATTEMPTS:])}")
    for before in status.history:
        nodes = count(before["nodes"], "node")
        click.echo(f"resumed {before['resumed']}, when it was {before['state']} on {nodes}")


@click.command("logs")
@run_argument
@click.option("--node", type=int, default=0, show_default=True, help="Rank of the node.")
@click.option(
    "--phase",
    type=click.Choice(["precompile", "train", "prepare"]),
    help="Phase  [default: the latest].",
)
@click.option("--batch", is_flag=True, help="Show the batch script's own log.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the run ends.")
@click.option(
    "-n", "--lines", type=int, default=100, show_default=True, help="Number of last lines; 0: all."
)
@path_option
def logs_command(
    run: str,
    node: int,
    phase: str | None,
    batch: bool,
    follow: bool,
    lines: int,
    path: tuple[str, ...],
) -> None:
    """Print the log of a node or of the batch script.

    \b
    Example:
      trnslurm logs last -f
      trnslurm logs last --node 1 -n 20
    """
    directory = _run(run, path)
    wanted = lines if lines > 0 else None

    def choose() -> Any:
        return choose_log(directory, phase=phase, node=node, batch=batch)

    out = sys.stdout.buffer
    if follow:
        for chunk in follow_log(choose, lambda: run_status(directory).final, lines=wanted):
            out.write(chunk)
            out.flush()
        return
    for chunk in print_log(log_of(directory, phase=phase, node=node, batch=batch), wanted):
        out.write(chunk)


@click.command("cancel")
@run_argument
@click.option("--now", is_flag=True, help="Do not wait for a checkpoint to be saved.")
@path_option
@json_option
def cancel_command(run: str, now: bool, path: tuple[str, ...], as_json: bool) -> None:
    """Cancel a run or a sweep, and the runs that wait for it.

    A training that is running on Slurm first saves a checkpoint, from which `trnslurm resume`
    continues.

    \b
    Example:
      trnslurm cancel last
      trnslurm cancel last --now
    """
    from trnslurm.submit.cancel import cancel_unless_ended

    said = []
    for directory in reversed(_runs(run, path)):  # last run first, so that none starts in between
        before, cancelled = cancel_unless_ended(directory, now=now)
        said += [{"run": each.run.name, "saves": each.saves} for each in cancelled]
        if as_json:
            continue
        if not cancelled:
            click.echo(f"{directory.name} has ended already: {before.state}")
        for each in cancelled:
            name = each.run.name
            saving = f"Cancelling {name}: it saves a checkpoint and ends; --now does not wait"
            click.echo(saving if each.saves else f"Cancelled {name}")
    if as_json:
        echo_json(said)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@run_argument
@click.option("--node", type=int, default=0, show_default=True, help="Rank of the node.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@path_option
def exec_command(run: str, node: int, command: tuple[str, ...], path: tuple[str, ...]) -> None:
    """Run a command on a node of a running job.

    On Slurm the command is a step inside the job's allocation.

    \b
    Example:
      trnslurm exec last -- neuron-top
      trnslurm exec last --node 1 -- ps -ef
    """
    from trnslurm.cluster.execute import exec_in_run

    sys.exit(exec_in_run(_run(run, path), node, command))
