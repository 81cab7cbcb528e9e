"""cancel, rm, keep, note: stop, remove, protect and annotate runs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from trnslurm.cli.options import (
    json_option,
    path_option,
    run_argument,
    run_or_sweep_argument,
    runs_argument,
    workspace_option,
)
from trnslurm.cli.output import Terminal, echo_json, echo_table
from trnslurm.config.search import Workspace
from trnslurm.contract.checkpoints import has_saved
from trnslurm.records.foreign import printable
from trnslurm.records.run import RunDir
from trnslurm.runs.find import find_runs
from trnslurm.runs.marks import keep, write_note
from trnslurm.runs.mend import saved_words
from trnslurm.runs.removal import left_over, named, oldest, remove
from trnslurm.runs.search import run_roots
from trnslurm.runs.tables import count, parse_age, parse_size, size_of, stamp_before
from trnslurm.submission.cancel import cancel_unless_ended

_LONGEST_NOTE = 1000


@click.command("cancel")
@run_or_sweep_argument
@click.option("--now", is_flag=True, help="Do not wait for a checkpoint to be saved.")
@path_option
@json_option
def cancel_command(runs: Sequence[RunDir], now: bool, console: Terminal) -> None:
    """Cancel a run or a sweep, and the runs that are waiting for it.

    On Slurm, a running job first saves a checkpoint. `trnslurm resume` continues from there.

    \b
    Example:
      trnslurm cancel last
      trnslurm cancel last --now
    """
    ended, cancelled = cancel_unless_ended(runs, now=now)
    if console.as_json:
        echo_json([{"run": each.run.name, "saves": each.saves} for each in cancelled])
        return
    for status in ended:
        click.echo(f"{status.run} has already ended: {status.words}")
    for each in cancelled:
        name = each.run.name
        saving = f"Cancelling {name}: saving a checkpoint first (use --now to skip it)"
        saved = each.run.cancelled_file.exists() and has_saved(each.run)
        resume = f"; {saved_words(each.run)}: trnslurm resume {name}" if saved else ""
        click.echo(saving if each.saves else f"Cancelled {name}{resume}")


@click.command("rm")
@runs_argument(required=False)
@click.option(
    "--checkpoints", is_flag=True, help="Remove only checkpoints; keep metrics, logs and scripts."
)
@click.option(
    "--older-than",
    metavar="AGE",
    help="Remove runs that ended longer ago than this, such as 12h, 30d or 4w.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Remove the runs that ended longest ago until the rest fits this size, such as 2T.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, without removing it.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@workspace_option
@json_option
def rm_command(
    runs: tuple[str, ...],
    checkpoints: bool,
    older_than: str | None,
    max_size: str | None,
    workspace: Workspace,
    console: Terminal,
) -> None:
    """Remove runs that have ended, or their checkpoints.

    Name the runs, or select them by age and size. A run is never removed if it may still be
    running, if another run starts from it, or if it is protected.

    \b
    Example:
      trnslurm rm 20261121-183212-gpt2_zero1
      trnslurm rm --checkpoints --older-than 30d --dry-run
      trnslurm rm --checkpoints --max-size 2T --yes
    """
    by_age = older_than is not None or max_size is not None
    if bool(runs) == by_age:
        raise click.UsageError("name runs, or select them with --older-than or --max-size")
    before = None if older_than is None else stamp_before(parse_age(older_than))
    most_bytes = None if max_size is None else parse_size(max_size)
    roots = run_roots(workspace)
    if by_age:
        chosen = oldest(roots, checkpoints=checkpoints, before=before, most_bytes=most_bytes)
    else:
        chosen = named(runs, roots, checkpoints=checkpoints)
    left = [words for c in chosen if checkpoints and (words := left_over(c.run))]
    chosen = sorted((c for c in chosen if c.bytes), key=lambda each: each.run.name)
    what = f"{'the checkpoints of ' if checkpoints else ''}{count(len(chosen), 'run')}"
    total = sum(each.bytes for each in chosen)
    runs_facts = [{"run": e.run.name, "bytes": e.bytes, "ended": e.ended} for e in chosen]
    facts = {"bytes": total, "runs": runs_facts}
    if console.as_json and (console.dry_run or not chosen):
        echo_json(facts | {"removed": False})
        return
    for words in left:
        console.say(words)
    if not chosen:
        click.echo("Nothing to remove")
        return
    console.refuse_unattended()
    if not console.as_json:
        rows = [
            (e.run.name, e.status.state, e.ended, size_of(e.bytes), e.status.note) for e in chosen
        ]
        echo_table(("run", "state", "ended", "size", "note"), rows, right="size")
    if console.dry_run:
        click.echo(f"\n{size_of(total)} would be freed")
        return
    console.confirm(f"Remove {what}, {size_of(total)}?")
    for each in chosen:
        remove(each, checkpoints=checkpoints)
    if console.as_json:
        echo_json(facts | {"removed": True})
    else:
        click.echo(f"Removed {what}, {size_of(total)}")


@click.command("keep")
@runs_argument()
@click.option("--undo", is_flag=True, help="Let `trnslurm rm` remove them again.")
@workspace_option
def keep_command(runs: tuple[str, ...], undo: bool, workspace: Workspace) -> None:
    """Protect runs: `trnslurm rm` never removes them or their checkpoints.

    \b
    Example:
      trnslurm keep 20261121-183212-gpt2_zero1
      trnslurm keep --undo 20261121-183212-gpt2_zero1
    """
    roots = run_roots(workspace)
    found = [run for word in runs for run in find_runs(word, roots)]
    keep(found, kept=not undo)
    for run in found:
        click.echo(f"{run.name} can be removed" if undo else f"{run.name} is protected")


@click.command("note")
@run_argument
@click.argument("text", nargs=-1)
@click.option("--clear", is_flag=True, help="Remove the note.")
@path_option
def note_command(run: RunDir, text: tuple[str, ...], clear: bool) -> None:
    """Write a note about a run, or print it.

    `runs`, `status` and `report` show it.

    \b
    Example:
      trnslurm note last "warmup doubled, after the spike at step 2000"
      trnslurm note last
    """
    if clear and text:
        raise click.UsageError("--clear removes the note: omit the text")
    if not text and not clear:
        click.echo(run.record().note)
        return
    words = " ".join(text)
    if len(words) > _LONGEST_NOTE or printable(words) != words:
        raise click.UsageError(
            f"a note must be one printable line of at most {_LONGEST_NOTE} characters"
        )
    write_note(run, words)
