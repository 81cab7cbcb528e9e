"""Write tables as text and as HTML, with readable numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.runs.foreign import printable


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = ""
) -> list[str]:
    """Return the lines of a table; `right` names the right-aligned columns, comma separated."""
    aligned = set(right.split(","))
    lines = [list(header), *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if name in aligned else cell.ljust(width)
            for cell, width, name in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> str:
    """Return a table for a notebook; texts are escaped, as others may have written them."""
    aligned = {*right.split(",")} - {""}

    def line(cells: Sequence[str], tag: str) -> str:
        styles = (f"text-align: {'right' if name in aligned else 'left'}" for name in header)
        return "".join(
            f'<{tag} style="{style}">{escaped(cell)}</{tag}>'
            for cell, style in zip(cells, styles, strict=True)
        )

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(header, 'th')}</tr></thead>\n" if any(header) else ""
    return f"<table>\n{head}<tbody>\n{body}\n</tbody>\n</table>"


def escaped(text: str) -> str:
    """Return a text as HTML."""
    import html  # for notebooks only

    return html.escape(printable(text))


def format_values(values: Mapping[str, str]) -> str:
    """Return the values of a sweep's run, as `key=value` texts."""
    return " ".join(f"{key}={value}" for key, value in values.items())


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
    """Return a formatted metric, or `-` if it is not a number: a job may write anything."""
    return format(value, form) if isinstance(value, int | float) else "-"
