"""report, compare: runs in an HTML report, or side by side in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trnslurm.cli.options import json_option, runs_argument, workspace_option
from trnslurm.cli.output import Terminal, echo_json, echo_table, say
from trnslurm.config.search import Workspace
from trnslurm.errors import RunError
from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir
from trnslurm.report.history import History, histories_of
from trnslurm.report.page import write_report
from trnslurm.report.summary import BY, HEADER, cells, remark, used_by
from trnslurm.report.tables import differing, tables_of_many
from trnslurm.runs.search import RunFilter, list_statuses, run_roots
from trnslurm.runs.silence import no_numbers
from trnslurm.runs.tables import parse_time


def _keys(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in BY or words.count(word) > 1:
            raise click.BadParameter(f"{printable(word)!r}: use {', '.join(BY)}, each at most once")
    return words


@click.command("report")
@runs_argument(required=False)
@click.option(
    "--since",
    metavar="TIME",
    help="Instead of a page, print what all runs since TIME used, such as 30d or 2026-11-01.",
)
@click.option(
    "--by",
    default="recipe",
    metavar="KEYS",
    callback=_keys,
    help=(
        f"With --since: print a row for each {', '.join(BY)}, or for each combination, such as "
        "user,recipe."
    ),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Page to write.  [default: RUN.html]",
)
@click.option("--png", is_flag=True, help="Also write each figure as a PNG next to the page.")
@workspace_option
@json_option
def report_command(
    runs: tuple[str, ...],
    since: str | None,
    by: tuple[str, ...],
    workspace: Workspace,
    console: Terminal,
    **page: Any,
) -> None:
    """Write an HTML report about a run, or a report that compares runs.

    The report is one HTML file that needs no network. It shows curves, a timeline of attempts and
    the cost of each, the batch plan and what ran, and the configuration. Given several runs or a
    sweep, it compares them.

    With --since, the command prints the node-hours, goodput and cost of all runs since then.
    Goodput is the share of node-hours spent on training.

    \b
    Example:
      trnslurm report last
      trnslurm report last -o report.html --png
      trnslurm report --since 30d --by user,recipe
      trnslurm report 20261121-183212-gpt2_zero1 20261122-090412-gpt2_zero1 -o compared.html
    """
    if since is not None:
        if runs or any(page.values()):
            raise click.UsageError("--since reports on all runs: omit RUN and --output")
        _print_use(workspace, console, parse_time(since), by)
        return
    if console.as_json:
        raise click.UsageError("--json requires --since")
    if not runs:
        raise click.UsageError("pass a run, such as last, or a time, such as --since 30d")
    histories = histories_of(runs, run_roots(workspace))
    write_page(histories, runs, page["output"], pictures=page["png"])


def _print_use(workspace: Workspace, console: Terminal, since: str, by: Sequence[str]) -> None:
    statuses, broken = list_statuses(workspace, RunFilter(everything=True, since=since))
    for error in broken:
        console.warn(str(error))
    found = [RunDir(Path(status.path)) for status in statuses]
    histories = [
        History(run, run.record(), status) for run, status in zip(found, statuses, strict=True)
    ]
    used = used_by(histories, by)
    if console.as_json:
        echo_json(
            [
                dict(zip(by, each.what, strict=True))
                | {name: value for name, value in asdict(each).items() if name != "what"}
                | {"goodput": each.goodput}
                for each in used
            ]
        )
        return
    if not histories:
        console.say("No runs were submitted since then")
        return
    echo_table([*by, *HEADER], [cells(each) for each in used], right=",".join(HEADER))
    if line := remark(used[-1]):
        click.echo(line)


def write_page(
    histories: Sequence[History], runs: Sequence[str], output: Path | None, *, pictures: bool
) -> None:
    """Write the report of runs to `output`, or to a file named after the runs."""
    first = histories[0]
    name = "report"
    if len(runs) == 1:
        name = first.record.group if len(histories) > 1 else first.run.name
    output = output or Path(f"{name}.html")
    if not output.parent.is_dir():
        raise RunError(f"{output}: there is no directory {output.parent}")
    for file in write_report(histories, output, pictures=pictures):
        click.echo(f"Wrote {printable(str(file))}")
    if line := no_numbers([each.status for each in histories]):
        say(line)


@click.command("compare")
@runs_argument()
@workspace_option
@json_option
def compare_command(runs: tuple[str, ...], workspace: Workspace, console: Terminal) -> None:
    """Compare the states and configurations of runs.

    `trnslurm report` shows their curves side by side.

    \b
    Example:
      trnslurm compare 20261121-183212-gpt2_zero1 20261122-090412-gpt2_zero1
    """
    found = histories_of(runs, run_roots(workspace))
    if console.as_json:
        facts = [
            {
                "run": h.run.name,
                "state": h.status.state,
                "nodes": h.record.nodes,
                "note": h.record.note,
                "steps": len(h.steps),
                "last": h.last,
                "node_hours": h.node_hours(),
                "lost_node_hours": h.lost_node_hours,
            }
            for h in found
        ]
        echo_json({"runs": facts, "differs": differing(found)})
        return
    standing, configuration = tables_of_many(found)
    echo_table(standing.header, standing.rows, right=",".join(standing.header[standing.numbers :]))
    click.echo(f"\n{standing.about}\n" if standing.about else "")
    if configuration.rows:
        echo_table(configuration.header, configuration.rows)
    elif len(found) > 1:
        click.echo(configuration.about)
    else:
        group = found[0].record.group
        click.echo(f"Name a second run to compare with{f', or the sweep {group}' * bool(group)}.")
