"""Print remarks, JSON and aligned tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from trnslurm.api.tables import text_table
from trnslurm.console import Console


class Terminal(Console):
    """Prints remarks on stderr."""

    def tell(self, text: str) -> None:
        say(text)


def say(text: str) -> None:
    """Print a remark on stderr."""
    click.echo(text, err=True)


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=2))


def echo_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows under a header; `right` names the right-aligned columns, comma separated."""
    click.echo("\n".join(text_table(header, rows, right=right)))
