"""top: a live view of runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from trnslurm.api.search import RunFilter, list_statuses, run_roots
from trnslurm.cli.options import run_name_argument, workspace_option
from trnslurm.config.search import Workspace
from trnslurm.console import Console
from trnslurm.errors import TrnslurmError
from trnslurm.runs.find import find_run
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, run_status


@click.command("top")
@functools.partial(run_name_argument, required=False)
@click.option(
    "--every",
    type=click.FloatRange(min=0.5),
    default=5.0,
    show_default=True,
    metavar="S",
    help="Refresh after this many seconds; each refresh is one squeue.",
)
@click.option("-a", "--all", "everything", is_flag=True, help="Show all runs, not the newest 20.")
@workspace_option
def top_command(run: str | None, every: float, everything: bool, workspace: Workspace) -> None:
    """Show runs live: progress, loss, speed, time left, last lines.

    Keys: Enter opens a run, l shows its log, c cancels and r resumes it, p writes its report, q
    quits.

    \b
    Example:
      trnslurm top
      trnslurm top last --every 2
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TrnslurmError("top needs a terminal: trnslurm status, or trnslurm watch")
    try:
        from trnslurm.top.app import Top
    except ImportError:
        raise TrnslurmError("top needs textual: pip install 'trnslurm[top]'") from None

    def listed() -> Sequence[RunStatus]:
        return list_statuses(workspace, RunFilter(everything=everything))[0]

    def cancel(chosen: RunDir) -> str:
        from trnslurm.submit.cancel import cancel_unless_ended

        before, cancelled = cancel_unless_ended(chosen, now=False)
        if not cancelled:
            return f"{chosen.name} has ended already: {before.state}"
        saves = cancelled[0].saves
        return f"Cancelling {chosen.name}: it saves a checkpoint" if saves else "Cancelled"

    def resume(chosen: RunDir) -> str:
        from trnslurm.submit.resume import Continuation
        from trnslurm.submit.resume import resume as resume_run

        console = Console(detach=True)
        how = Continuation(template_dirs=workspace.template_dirs())
        resume_run(chosen, how, console)
        return "\n".join([f"Resumed {chosen.name}", *console.remarks])

    def report(chosen: RunDir) -> str:
        from trnslurm.report.history import History
        from trnslurm.report.page import write_report

        file = Path(f"{chosen.name}.html").absolute()
        write_report([History(chosen, chosen.record(), run_status(chosen))], file, pictures=False)
        return f"Wrote {file}"

    first = find_run(run, run_roots(workspace)) if run else None
    acts = {"cancel": cancel, "resume": resume, "report": report}
    Top(listed, every_s=every, acts=acts, first=first).run()
