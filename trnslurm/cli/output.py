"""The terminal: remarks, JSON, aligned tables, confirmation, and the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trnslurm.console import Console
from trnslurm.errors import TrnslurmError
from trnslurm.runs.tables import text_table


class Terminal(Console):
    """Prints remarks on stderr."""

    def tell(self, text: str) -> None:
        say(text)

    def refuse_unattended(self) -> None:
        """Refuse to remove anything if confirmation is required and there is no terminal."""
        if not (self.yes or self.dry_run or sys.stdin.isatty()):
            raise TrnslurmError("no terminal to ask for confirmation: pass --yes or --dry-run")

    def confirm(self, question: str) -> None:
        """Ask, unless --yes was given."""
        if not self.yes:
            click.confirm(question, abort=True, err=True)


def command_line() -> list[str]:
    """Return the user's command line, for run.json."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def say(text: str) -> None:
    """Print a remark on stderr."""
    click.echo(text, err=True)


def echo_text(text: str) -> None:
    """Print lines, wrapped between words if the output is a terminal."""
    if sys.stdout.isatty():
        import shutil

        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width) for line in text.splitlines())
    click.echo(text)


def _broken(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    import textwrap

    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(), width, initial_indent=indent, subsequent_indent=f"{indent}    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=2))


def echo_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows under a header. `right` lists the right-aligned columns, separated by commas."""
    click.echo("\n".join(text_table(header, rows, right=right)))
