"""report, compare: runs on a page, or next to one another in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from trnslurm.api.search import run_roots
from trnslurm.cli.options import json_option, runs_argument, workspace_option
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.config.search import Workspace
from trnslurm.errors import RunError
from trnslurm.report.history import History, histories_of
from trnslurm.report.page import write_report
from trnslurm.report.tables import differing, tables_of_many
from trnslurm.runs.foreign import printable


@click.command("report")
@runs_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write.  [default: RUN.html]",
)
@click.option("--png", is_flag=True, help="Also write each figure as a PNG next to the page.")
@workspace_option
def report_command(
    runs: tuple[str, ...], output: Path | None, png: bool, workspace: Workspace
) -> None:
    """Write a page about a run, or a page that compares several runs.

    It is one HTML file that needs no network: curves, a timeline of attempts and what each cost,
    the batch plan and what ran, and the configuration. Several runs, or a sweep, are compared.

    \b
    Example:
      trnslurm report last
      trnslurm report last -o report.html --png
      trnslurm report 20261121-183212-gpt2_zero1 20261122-090412-gpt2_zero1 -o compared.html
    """
    histories = histories_of(runs, run_roots(workspace))
    write_page(histories, runs, output, pictures=png)


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


@click.command("compare")
@runs_argument()
@workspace_option
@json_option
def compare_command(runs: tuple[str, ...], workspace: Workspace, console: Terminal) -> None:
    """Compare runs: their states, and what differs in their configuration.

    Curves side by side are in `trnslurm report`.

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
    click.echo()
    if configuration.rows:
        echo_table(configuration.header, configuration.rows)
    else:
        click.echo(configuration.about)
