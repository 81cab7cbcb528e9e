"""Print results: aligned tables, JSON, readable numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from trnslurm.runs.foreign import printable


def echo_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=2))


def echo_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
    """Print rows under a header; `right` names the right-aligned columns, comma separated."""
    aligned = set(right.split(","))
    lines = [list(header), *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [
            cell.rjust(width) if name in aligned else cell.ljust(width)
            for cell, width, name in zip(line, widths, header, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def hours(value: float | None) -> str:
    """Return hours for a table: one decimal below 100, whole numbers above."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def dollars(value: float | None) -> str:
    """Return a sum of US dollars for a table."""
    return "-" if value is None else f"${value:,.0f}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def figure(value: Any, form: str) -> str:
    """Return a formatted metric, or `-` if it is not a number: jobs write what they like."""
    return format(value, form) if isinstance(value, int | float) else "-"
