"""resume, watch: continue runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from trnslurm.cli.follow import INTERRUPTED, report_started
from trnslurm.cli.options import (
    ScriptCommand,
    cluster_option,
    json_option,
    notify_option,
    path_option,
    run_argument,
    run_name_argument,
    take_nodes,
    workspace_option,
)
from trnslurm.cli.output import Terminal, command_line, echo_json, say
from trnslurm.config.search import Workspace
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.errors import ConfigError
from trnslurm.records.run import RunDir
from trnslurm.runs.find import find_runs
from trnslurm.runs.search import run_roots
from trnslurm.runs.watch import watch
from trnslurm.submission.resume import Continuation, Resumed, resume, resume_sweep
from trnslurm.submission.submit import submit

_IN_S3 = "s3://"
_EVERY = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@click.command("resume", cls=ScriptCommand)
@run_name_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@click.option(
    "-n",
    "--nodes",
    type=click.UNPROCESSED,
    callback=take_nodes,
    help="Continue on this number of nodes, or on a range such as 2-4.",
)
@click.option("--stop-at", type=int, metavar="STEP", help="End after this step (0 for the last).")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help=(
        "Change a cap, a variable (env.NAME), or slurm.account, qos, reservation or time_min. When "
        "resuming from S3, set any key."
    ),
)
@click.option(
    "--force",
    is_flag=True,
    help="Start a custom script again even if it may overwrite its unreported checkpoints.",
)
@cluster_option
@notify_option
@workspace_option
@click.option(
    "-f", "--follow", is_flag=True, help="On Slurm: wait until the run ends, and show its progress."
)
@click.option(
    "--detach", is_flag=True, help="On the local cluster: return at once; the run keeps running."
)
@json_option
def resume_command(
    run: str, cluster: str | None, workspace: Workspace, console: Terminal, **options: Any
) -> None:
    """Resume a run or a sweep from its newest checkpoint.

    The run is submitted again in the same directory, with the same code and configuration, no
    matter why it ended before its last step. None of its jobs may still be running, and Slurm must
    confirm that. Runs of a chain that are waiting for this run are submitted too.

    With --nodes, the run continues on another number or range of nodes, with the same global batch.
    Missing graphs for that number are compiled first.

    A run that ended at train.stop_at continues to its last step, or to the step of --stop-at.

    If a run has used up slurm.max_node_hours, slurm.max_cost or slurm.max_attempts, raise the limit
    with --set. --set also changes an environment variable (env.NAME) and how Slurm queues the job:
    slurm.account, slurm.qos, slurm.reservation and slurm.time_min.

    If a custom script has written checkpoints without reporting them, it may start at step 0 and
    overwrite them. Pass --force if the script finds them itself. Words after -- are added to the
    script's arguments from now on and replace those of an earlier resume. {resume} stands for the
    newest checkpoint, and '' removes the words.

    --notify replaces the recipients of the run's notifications, and '' removes them.

    A run that Slurm holds because its launch failed is released instead.

    In a sweep, all runs that ended without completing are resumed.

    s3://BUCKET/PREFIX/RUN continues a run from its mirror in S3, if its files are gone or on
    another cluster. A new run with the same code and configuration fetches the newest checkpoint.

    \b
    Example:
      trnslurm resume last
      trnslurm resume last --nodes 4
      trnslurm resume last --stop-at 2000
      trnslurm resume last --set slurm.max_cost=500
      trnslurm resume last --set env.NCCL_DEBUG=INFO
      trnslurm resume last -- --resume_from_checkpoint {resume}
      trnslurm resume s3://bucket/runs/20261127-025400-gpt2_zero1 --cluster p4d
    """
    how = Continuation(template_dirs=workspace.template_dirs(), **options)
    if run.startswith(_IN_S3):
        if how.arguments:
            raise click.UsageError("arguments can only be passed to a run that continues in place")
        from trnslurm.submission.moved import propose_moved  # few need it

        submission = propose_moved(run, how, cluster, workspace, console)
        started, extras = submit(submission, command_line(), console)
        report_started(started, console, extras)
        return
    if cluster:
        raise click.UsageError(
            "--cluster works only with a run in S3: other runs continue in place"
        )
    first, *others = found = find_runs(run, run_roots(workspace))
    if others:
        started = resume_sweep(found, how, console)
        if started or console.as_json:
            report_started(started, console)
        return
    done = resume(first, how, console)
    if not done.released:
        report_started(done.runs, console)
    elif console.as_json:
        facts = {"run": first.name, "directory": str(first.path), "jobs": {}}
        echo_json({**facts, "released": list(done.released)})
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
@click.option("--every", metavar="TIME", default="30s", help="Interval: 30s, 5m, 1h.")
@click.option(
    "--max",
    "most",
    type=click.IntRange(min=1),
    default=3,
    help="Give up after this many resumes without a newer checkpoint.",
)
@path_option
def watch_command(run: RunDir, resuming: bool, every: str, most: int) -> None:
    """Print each change of a run's state until it ends.

    --resume also resumes a run that ended before its last step, and releases a job that Slurm holds
    after a failed launch. Ctrl-C ends this command, not the run.

    The exit code is 0 if the run completed, otherwise 1.

    \b
    Example:
      trnslurm watch last
      trnslurm watch last --resume --every 1m
    """

    def resume_again() -> str:
        return _done(resume(run, Continuation(), _Timed(detach=True)))

    try:
        status = watch(
            run,
            say=_say_when,
            every_s=parse_every(every),
            resume=resume_again if resuming else None,
            most=most,
        )
    except KeyboardInterrupt:
        say(f"\n{run.name} is still running: trnslurm status {run.name}")
        sys.exit(INTERRUPTED)
    if status.next:
        click.echo(f"next: {status.next}")
    sys.exit(0 if status.state is State.COMPLETED else 1)


def parse_every(text: str) -> float:
    """Return a time such as 30s, 5m or 1h in seconds."""
    match = _EVERY.fullmatch(text)
    if not match or not float(match[1]):
        raise ConfigError(f"--every {text}: expected a time such as 30s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _done(done: Resumed) -> str:
    """Return a line that says how a run was continued."""
    (run, *_) = done.runs
    if done.released:
        return f"Released job {', '.join(done.released)} of {run.name}"
    return f"Resumed {run.name}"


class _Timed(Terminal):
    """Prints remarks with a timestamp."""

    def tell(self, text: str) -> None:
        _say_when(text)


def _say_when(text: str) -> None:
    click.echo(f"{utc_time()} {text}")
