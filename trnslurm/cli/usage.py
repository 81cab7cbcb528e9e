"""usage: how a run's nodes use their devices, processors, memory and network."""

from __future__ import annotations

import click

from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.errors import RunError
from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status
from trnslurm.runs.usage import rows_of, usage_of


@click.command("usage")
@run_argument
@path_option
@json_option
def usage_command(run: RunDir, console: Terminal) -> None:
    """Show the device, processor and memory use of each node of a run.

    The values are means over the last minute. The values of all minutes are in usage/ in the run
    directory. Problems are listed below the table: idle devices, clocks throttled by heat, memory
    that is running out, and rising error counts.

    \b
    Example:
      trnslurm usage last
      trnslurm usage last --json
    """
    found = usage_of(run, run_status(run))
    if console.as_json:
        echo_json(found.facts())
        return
    if not found.nodes:
        raise RunError(
            f"no node of {run.name} has recorded its use. Nodes start to record when an attempt "
            "begins, unless usage_seconds in the profile is 0"
        )
    header, rows = rows_of(found.nodes)
    echo_table(header, rows, right=",".join(set(header) - {"host", "as of"}))
    for line in found.told():
        click.echo(line)
