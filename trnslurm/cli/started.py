"""What is said of runs that were started, and staying with them until they end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from trnslurm.cli.output import echo_json
from trnslurm.run import RunDir
from trnslurm.submit import cancel

INTERRUPTED = 130


def report_started(
    runs: Sequence[RunDir], *, local: bool, follow: bool, detach: bool, as_json: bool
) -> None:
    """Name the runs and their jobs, and stay with them if that is wanted."""
    jobs = [{} if local else dict(run.record().jobs) for run in runs]
    if as_json:
        said = [
            {"run": run.name, "directory": str(run.path), "jobs": ids}
            for run, ids in zip(runs, jobs, strict=True)
        ]
        echo_json(said if len(said) > 1 else said[0])
    else:
        for run, ids in zip(runs, jobs, strict=True):
            words = "".join(f"  {phase} {job_id}" for phase, job_id in ids.items())
            click.echo(f"Submitted {run.name}{words}")
    if follow or (local and not detach):
        sys.exit(_follow_all(runs, local=local, quiet=as_json))
    if not as_json:
        click.echo(f"See: trnslurm status {runs[0].name}")


def say(text: str) -> None:
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
    from trnslurm.cli.following import follow_run

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
