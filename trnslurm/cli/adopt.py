"""adopt: translate a user's batch script into trnslurm's terms, or write it as a recipe."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from trnslurm.adopt.adopt import adopt
from trnslurm.adopt.found import Adopted
from trnslurm.adopt.recipe import save_as_recipe
from trnslurm.cli.options import json_option
from trnslurm.cli.output import Terminal, echo_json
from trnslurm.config.batch_script import is_batch_script
from trnslurm.plan.spec import check_job_name
from trnslurm.records.foreign import printable

_MARKS = {"taken": " ", "ours": "-", "left out": "-", "once": "!", "unclear": "?"}


@click.command("adopt")
@click.argument("file", metavar="FILE")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENT...]", type=click.UNPROCESSED)
@click.option("--recipe", metavar="NAME", help="Also write a recipe: jobs/NAME/recipe.yaml.")
@click.option(
    "--force",
    is_flag=True,
    help="With --recipe: replace an existing recipe, and skip lines that were not understood.",
)
@json_option
def adopt_command(
    file: str, arguments: tuple[str, ...], recipe: str | None, force: bool, console: Terminal
) -> None:
    """Translate a batch script into trnslurm's terms, line by line.

    The last line is the command. If you submit that command, trnslurm starts the workers itself,
    and the run survives lost nodes, hangs and time limits. `trnslurm submit FILE` runs the file
    unchanged, without these features. This command runs nothing.

    ARGUMENTS are the script's arguments ($1 and so on). If a line was not understood, the command
    omits that line, and the exit code is 1.

    \b
    Example:
      trnslurm adopt job.sbatch
      trnslurm adopt job.sbatch -- config.yaml 3e-4
      trnslurm adopt job.sbatch --recipe mine
      trnslurm adopt job.sbatch --json
    """
    found = adopt(Path(file), arguments, os.environ)
    words = shlex.join([file, *(("--", *arguments) if arguments else ())])
    as_it_is = f"trnslurm submit {words}" if is_batch_script(Path(file)) else ""
    if recipe is not None:
        check_job_name(recipe)
        line = save_as_recipe(found, recipe, os.environ, force=force)
        click.echo(f"Wrote jobs/{recipe}/recipe.yaml. Review it, then run: {line}", err=True)
    if console.as_json:
        echo_json(_tree(found, as_it_is))
    else:
        _show(found, as_it_is)
    sys.exit(1 if found.unclear else 0)


def _tree(found: Adopted, as_it_is: str) -> dict[str, object]:
    return {
        "lines": [
            {"line": each.number, "text": each.text, "fate": each.fate, "becomes": each.becomes}
            for each in found.lines
        ],
        "command": found.line if found.command else None,
        "as_it_is": as_it_is or None,
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _show(found: Adopted, as_it_is: str) -> None:
    width = max(shutil.get_terminal_size().columns, 80)
    text = max(20, min(max(len(line.text) for line in found.lines), (width - 10) // 2))
    for line in found.lines:
        number = str(line.number or "")
        becomes = _cut(line.becomes, max(20, width - text - 10))
        said = f"{number:>4} {_MARKS[line.fate]} {_cut(line.text, text):<{text}}  {becomes}"
        click.echo(printable(said.rstrip()))
    unclear = [str(line.number) for line in found.unclear if line.number]
    click.echo()
    if not found.command:
        runs = f"To run it unchanged: {as_it_is}" if as_it_is else "It has no #SBATCH lines."
        click.echo(f"Could not find the training command. {runs}")
        return
    click.echo(printable(found.line))
    click.echo()
    if unclear:
        many = "line" if len(unclear) == 1 else "lines"
        whole = f" To run the whole file: {as_it_is}" if as_it_is else ""
        click.echo(
            f"Not understood (?): {many} {', '.join(unclear)}, which this command omits.{whole}"
        )
