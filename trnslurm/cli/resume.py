"""resume, watch: continue runs."""

from __future__ import annotations

import re
import sys

import click

from trnslurm.api.search import run_roots, workspace_of
from trnslurm.cli.follow import INTERRUPTED, report_started
from trnslurm.cli.options import json_option, notify_option, path_option, run_argument
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.errors import ConfigError
from trnslurm.rundir import utc_time
from trnslurm.runs.find import find_run, find_runs
from trnslurm.runs.watch import watch
from trnslurm.submit.resume import Continuation, Resumed, resume, resume_sweep

_EVERY = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@click.command("resume")
@run_argument
@click.option("-n", "--nodes", type=int, help="Continue on this number of nodes.")
@click.option("--stop-at", type=int, metavar="STEP", help="End after this step; 0: the last.")
@notify_option
@path_option
@click.option(
    "-f", "--follow", is_flag=True, help="On Slurm: wait until the run ends, and show its progress."
)
@click.option(
    "--detach", is_flag=True, help="On the local cluster: return at once; the run continues."
)
@json_option
def resume_command(
    run: str,
    nodes: int | None,
    stop_at: int | None,
    notify: tuple[str, ...],
    path: tuple[str, ...],
    follow: bool,
    detach: bool,
    as_json: bool,
) -> None:
    """Resume a run or a sweep from its newest checkpoint.

    The run is submitted again in the same directory, with the same code and configuration, whatever
    ended it before its last step. None of its jobs may be running, and Slurm must confirm that.
    The runs of a chain that wait for it are submitted too.

    With --nodes it continues on another number of nodes with the same global batch; graphs that
    are not compiled for that number are compiled first.

    A run that ended at train.stop_at continues to its last step, or to the step of --stop-at.

    --notify replaces the receivers of the run's notifications, as for submit; '' removes them.

    A run that Slurm holds because its launch failed is released instead.

    In a sweep, all runs that ended without completing are resumed.

    \b
    Example:
      trnslurm resume last
      trnslurm resume last --nodes 4
      trnslurm resume last --stop-at 2000
    """
    workspace = workspace_of(path)
    console = Terminal(follow=follow, detach=detach, as_json=as_json)
    how = Continuation(
        nodes=nodes, stop_at=stop_at, notify=notify, template_dirs=workspace.template_dirs()
    )
    directory, *others = found = find_runs(run, run_roots(workspace))
    if others:
        report_started(resume_sweep(found, how, console), console)
        return
    done = resume(directory, how, console)
    if not done.released:
        report_started(done.runs, console)
    elif as_json:
        echo_json(
            {
                "run": directory.name,
                "directory": str(directory.path),
                "jobs": {},
                "released": list(done.released),
            }
        )
    else:
        click.echo(_done(done))


@click.command("watch")
@run_argument
@click.option(
    "--resume",
    "resuming",
    is_flag=True,
    help="Resume the run whenever it stops before its last step.",
)
@click.option(
    "--every", metavar="TIME", default="30s", show_default=True, help="Interval: 30s, 5m, 1h."
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Give up after this many resumes without a newer checkpoint.",
)
@path_option
def watch_command(run: str, resuming: bool, every: str, most: int, path: tuple[str, ...]) -> None:
    """Print each change of a run's state until it ends.

    --resume also resumes a training that ended before its last step, and releases a job that Slurm
    holds after a failed launch. Ctrl-C ends the watching, not the run.

    The exit code is 0 if the run completed, otherwise 1.

    \b
    Example:
      trnslurm watch last
      trnslurm watch last --resume --every 1m
    """
    directory = find_run(run, run_roots(workspace_of(path)))

    def resume_again() -> str:
        return _done(resume(directory, Continuation(), _Timed(detach=True)))

    try:
        status = watch(
            directory,
            say=_say_when,
            every_s=parse_every(every),
            resume=resume_again if resuming else None,
            most=most,
        )
    except KeyboardInterrupt:
        click.echo(f"\n{directory.name} continues: trnslurm status {directory.name}", err=True)
        sys.exit(INTERRUPTED)
    if status.mend:
        click.echo(f"next: {status.mend}")
    sys.exit(0 if status.state == "COMPLETED" else 1)


def parse_every(text: str) -> float:
    """Return the seconds in a time such as 30s, 5m or 1h."""
    match = _EVERY.fullmatch(text)
    if not match or not float(match[1]):
        raise ConfigError(f"--every {text}: expected a time such as 30s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _done(done: Resumed) -> str:
    """Return a line that tells how a run was continued."""
    (run, *_) = done.runs
    if done.released:
        return f"Released job {', '.join(done.released)} of {run.name}"
    return f"Resumed {run.name}"


class _Timed(Terminal):
    """Prints remarks with a time stamp."""

    def tell(self, text: str) -> None:
        _say_when(text)


def _say_when(text: str) -> None:
    click.echo(f"{utc_time()} {text}")
