"""triage: which rank failed first, and why."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.cli.options import json_option, path_option, run_argument
from trnslurm.cli.output import echo_json
from trnslurm.node.triage.finding import Finding, find_cause, nothing_found
from trnslurm.runs.find import find_run
from trnslurm.runs.status import choose_attempt


@click.command("triage")
@run_argument
@click.option(
    "--phase",
    type=click.Choice(["precompile", "train", "prepare"]),
    help="Phase  [default: the last].",
)
@click.option("--attempt", type=int, metavar="N", help="Attempt  [default: the newest].")
@path_option
@json_option
def triage_command(
    run: str, phase: str | None, attempt: int | None, path: tuple[str, ...], as_json: bool
) -> None:
    """Show which rank failed first, why, and what to do.

    All nodes' logs and the workers' files in state/ are searched. The exit code is 1 if they show
    no failure.

    \b
    Example:
      trnslurm triage last
      trnslurm triage last --attempt 1 --json
    """
    directory = find_run(run, run_roots(workspace_of(path)))
    chosen = choose_attempt(directory, phase=phase, attempt=attempt)
    found = find_cause(directory.path, chosen.phase, chosen.attempt)
    if as_json:
        echo_json(asdict(found) if found else None)
    elif found:
        echo_finding(found)
    else:
        click.echo("\n".join(nothing_found(directory.path, chosen.phase, chosen.attempt)))
    sys.exit(0 if found else 1)


def echo_finding(found: Finding) -> None:
    """Print who failed first, and why."""
    click.echo("\n".join(found.report()))
