"""What is said of runs that were started, and staying with them until they end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from trnslurm.cli.output import echo_json
from trnslurm.runs.run import RunDir
from trnslurm.submit.cancel import cancel

INTERRUPTED = 130


def report_started(
    runs: Sequence[RunDir], others: Sequence[RunDir] = (), *, local: bool, follow: bool,
    detach: bool, as_json: bool,
) -> None:  # fmt: skip
    """Name the runs and their jobs, and stay with them if that is wanted.

    `others` were started beside them, and are not followed.
    """
    if as_json:
        said = [_facts(run, local=local) for run in runs]
        said[0] |= {"elastic": [_facts(run, local=local) for run in others]} if others else {}
        echo_json(said if len(said) > 1 else said[0])
    else:
        for run in (*runs, *others):
            jobs = _facts(run, local=local)["jobs"].items()
            click.echo(f"Submitted {run.name}{''.join(f'  {phase} {job}' for phase, job in jobs)}")
    if follow or (local and not detach):
        sys.exit(_follow_all(runs, local=local, quiet=as_json))
    if not as_json:
        click.echo(f"See: trnslurm status {runs[0].name}")


def _facts(run: RunDir, *, local: bool) -> dict[str, Any]:
    jobs = {} if local else dict(run.record().jobs)
    return {"run": run.name, "directory": str(run.path), "jobs": jobs}


def say(text: str) -> None:
    """Say something that is no result."""
    click.echo(text, err=True)


def _follow_all(runs: Sequence[RunDir], *, local: bool, quiet: bool) -> int:
    """Follow one run after the other; those after one that failed end with it."""
    worst = 0
    for run in runs:
        code = _follow(run, local=local, quiet=quiet)
        worst = max(worst, code)
        if code == INTERRUPTED:
            break
    return worst


def _follow(run: RunDir, *, local: bool, quiet: bool) -> int:
    from trnslurm.cli.follow import follow_run

    try:
        status = follow_run(run, quiet=quiet)
    except KeyboardInterrupt:
        if not local:
            click.echo(f"\n{run.name} goes on: trnslurm status {run.name}", err=True)
            return INTERRUPTED
        click.echo("\nStopping …", err=True)
        cancel(run)
        click.echo(f"{run.name}: CANCELLED", err=True)
        return INTERRUPTED
    return 0 if status.state == "COMPLETED" else 1
