"""top: a live view of runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from trnslurm.cli.options import run_name_argument, workspace_option
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.runs.find import find_run
from trnslurm.runs.search import RunFilter, list_statuses, run_roots
from trnslurm.runs.status import RunStatus, run_status


@click.command("top")
@functools.partial(run_name_argument, required=False)
@click.option(
    "--every",
    type=click.FloatRange(min=0.5),
    default=5.0,
    metavar="S",
    help="Number of seconds between refreshes; each refresh is one squeue call.",
)
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Show all runs, not only the newest 20."
)
@workspace_option
def top_command(run: str | None, every: float, everything: bool, workspace: Workspace) -> None:
    """Show runs live: progress, loss, speed, time left and last lines.

    Keys: Enter opens a run, l shows its log, c cancels it, r resumes it, p writes its report, and q
    quits.

    \b
    Example:
      trnslurm top
      trnslurm top last --every 2
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TrnslurmError("top needs a terminal: use trnslurm status or trnslurm watch instead")
    try:
        from trnslurm.top.app import Top
    except ImportError:
        raise TrnslurmError(
            "top needs textual: run pip install '.[top]' in a clone of trnslurm"
        ) from None

    def listed() -> Sequence[RunStatus]:
        return list_statuses(workspace, RunFilter(everything=everything))[0]

    first = find_run(run, run_roots(workspace)) if run else None
    acts = {"cancel": _cancel, "resume": lambda run: _resume(workspace, run), "report": _report}
    Top(listed, every_s=every, acts=acts, first=first).run()


def _cancel(run: RunDir) -> str:
    from trnslurm.submission.cancel import cancel_unless_ended  # as the others: for a key only

    ended, cancelled = cancel_unless_ended([run])
    if not cancelled:
        return f"{run.name} has already ended: {ended[0].state}"
    return f"Cancelling {run.name}: saving a checkpoint" if cancelled[0].saves else "Cancelled"


def _resume(workspace: Workspace, run: RunDir) -> str:
    from trnslurm.submission.resume import Continuation, resume

    console = Console(detach=True)
    resume(run, Continuation(template_dirs=workspace.template_dirs()), console)
    return "\n".join([f"Resumed {run.name}", *console.remarks])


def _report(run: RunDir) -> str:
    from trnslurm.report.history import History
    from trnslurm.report.page import write_report

    file = Path(f"{run.name}.html").absolute()
    write_report([History(run, run.record(), run_status(run))], file, pictures=False)
    return f"Wrote {file}"
