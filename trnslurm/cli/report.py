"""report: a page about one run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.cli.options import path_option
from trnslurm.errors import RunError
from trnslurm.report.history import History
from trnslurm.report.page import write_report
from trnslurm.runs.find import find_runs
from trnslurm.runs.foreign import printable
from trnslurm.runs.status import statuses_of

_MOST = 100


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write.  [default: RUN.html]",
)  # fmt: skip
@click.option("--png", is_flag=True, help="Also write each figure as a PNG beside the page.")
@path_option
def report_command(
    runs: tuple[str, ...], output: Path | None, png: bool, path: tuple[str, ...]
) -> None:
    """Write a page about a run, or about several beside each other.

    It is one HTML file that needs no network: curves, a timeline of attempts and what each cost,
    the batch plan beside what ran, and the configuration. Several runs, or a sweep, are compared.

    \b
    Example:
      trnslurm report last
      trnslurm report last -o report.html --png
      trnslurm report 20261121-183212-gpt2_zero1 20261122-090412-gpt2_zero1 -o compared.html
    """
    roots = run_roots(workspace_of({"path": path}))
    found = list(dict.fromkeys(run for word in runs for run in find_runs(word, roots)))
    if len(found) > _MOST:
        raise RunError(f"{len(found)} runs are too many for one page: name at most {_MOST}")
    statuses, broken = statuses_of(found)
    if broken:
        raise broken[0]
    histories = [
        History(run, run.record(), status) for run, status in zip(found, statuses, strict=True)
    ]
    name = histories[0].record.group or found[0].name if len(runs) == 1 else "report"
    output = output or Path(f"{name}.html")
    if not output.parent.is_dir():
        raise RunError(f"{output}: there is no directory {output.parent}")
    for file in write_report(histories, output, pictures=png):
        click.echo(f"Wrote {printable(str(file))}")
