"""report: a page about one run, or a page that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.cli.options import path_option, runs_argument
from trnslurm.errors import RunError
from trnslurm.report.history import History, histories_of
from trnslurm.report.page import write_report
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
@path_option
def report_command(
    runs: tuple[str, ...], output: Path | None, png: bool, path: tuple[str, ...]
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
    histories = histories_of(runs, run_roots(workspace_of(path)))
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
