"""usage: what the devices, processors, memory and network of a run's nodes do."""

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
    """Show what each node of a run uses: devices, processors, memory.

    The values are means over the last minute. The values of all minutes are in usage/ of the run
    directory. Below the table are problems: an idle device, a clock that heat has lowered, memory
    that is running out, a rising count of errors.

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
            f"no node of {run.name} has recorded its use; nodes do so when an attempt begins, "
            "unless usage_seconds of the profile is 0"
        )
    header, rows = rows_of(found.nodes)
    echo_table(header, rows, right=",".join(set(header) - {"host", "as of"}))
    for line in found.told():
        click.echo(line)
