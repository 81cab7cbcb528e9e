"""compare: runs side by side, in the terminal."""

from __future__ import annotations

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.cli.options import json_option, path_option, runs_argument
from trnslurm.cli.output import echo_json, echo_table
from trnslurm.report.history import histories_of
from trnslurm.report.tables import differing, tables_of_many


@click.command("compare")
@runs_argument()
@path_option
@json_option
def compare_command(runs: tuple[str, ...], path: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: their states, and what differs in their configuration.

    Curves side by side are in `trnslurm report`.

    \b
    Example:
      trnslurm compare 20261121-183212-gpt2_zero1 20261122-090412-gpt2_zero1
    """
    found = histories_of(runs, run_roots(workspace_of(path)))
    if as_json:
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
