"""Formats tables as text and as HTML, formats amounts, and parses them from options."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trnslurm.contract.times import utc_time
from trnslurm.errors import ConfigError
from trnslurm.records.foreign import printable
from trnslurm.runs.status import RunStatus

T = TypeVar("T")
HEADER = ("run", "state", "cluster", "nodes", "step", "loss", "reason")
"""The header of the table of runs."""
RIGHT = "nodes,step,loss"
_MOST_REASON = 120
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST_LINES, _FIRST_LINES, _LAST_LINES = 64, 9, 3
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = ""
) -> list[str]:
    """Return the lines of a table. `right` lists the right-aligned columns, separated by commas."""
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


def ends_of(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines, or only the first and last ones if there are many, as for a job array's runs."""
    if len(lines) <= _MOST_LINES:
        yield from lines
        return
    yield from lines[:_FIRST_LINES]
    yield f"... {len(lines) - _FIRST_LINES - _LAST_LINES} more ..."
    yield from lines[-_LAST_LINES:]


def cells_of(
    columns: Mapping[str, Callable[[T], str]], items: Iterable[T]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return a table's header and rows, with a column for each name and a row for each item."""
    return [*columns], [[cell(item) for cell in columns.values()] for item in items]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> str:
    """Return a table for a notebook. Strings are escaped, because others may have written them."""
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
    """Escape a string for HTML."""
    import html  # for notebooks only

    return html.escape(printable(text))


def format_values(values: Mapping[str, str]) -> str:
    """Format the values of a sweep's run as `key=value` strings."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def hours(value: float | None) -> str:
    """Format hours for a table: with one decimal below 100, as whole numbers above."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def dollars(value: float | None) -> str:
    """Format a sum of US dollars for a table."""
    return "-" if value is None else f"${value:,.0f}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 node` or `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def figure(value: Any, form: str) -> str:
    """Format a metric, or return `-` if it is not a number, because a job may write anything."""
    return format(value, form) if isinstance(value, int | float) else "-"


def size_of(size: float) -> str:
    """Format a number of bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def parse_age(text: str, option: str = "--older-than") -> float:
    """Return an age such as `12h`, `30d` or `4w` in seconds."""
    match = re.fullmatch(r"(\d{1,9})([hdw])", text)
    if not match:
        raise ConfigError(f"{option} {text}: expected hours, days or weeks, such as 12h, 30d or 4w")
    return int(match[1]) * _SECONDS[match[2]]


def parse_time(text: str, option: str = "--since") -> str:
    """Return a date, or the time that long ago, in the records' format."""
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return f"{text}T00:00:00Z"
    try:
        return stamp_before(parse_age(text, option))
    except ConfigError:
        raise ConfigError(
            f"{option} {text}: expected a date or an age, such as 2026-11-21, 12h, 30d or 4w"
        ) from None


def stamp_before(seconds: float) -> str:
    """Return the time that many seconds ago, in the records' format."""
    return utc_time(max(0.0, time.time() - seconds))


def parse_size(text: str) -> int:
    """Return a size such as `500M`, `50G` or `1T` in bytes."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text)
    if not match:
        raise ConfigError(f"--max-size {text}: expected a size, such as 500M, 50G or 1T")
    return int(match[1]) * _UNITS[match[2]]


def progress(status: RunStatus) -> tuple[str, str]:
    """Return the step and the loss for a table."""
    metrics = status.metrics
    step = f"{metrics['step']}/{metrics.get('steps', '?')}" if "step" in metrics else "-"
    return step, figure(metrics.get("loss"), ".4f")


def runs_table(
    statuses: Sequence[RunStatus], *, values: bool
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and rows of a table of runs. `values` adds the values of a sweep."""
    keys = swept_keys(statuses) if values else []
    rows = [(s.run, *(s.values.get(key, "-") for key in keys), *cells(s)[1:]) for s in statuses]
    return (HEADER[0], *keys, *HEADER[1:]), rows


def swept_keys(statuses: Sequence[RunStatus]) -> list[str]:
    """Return the keys in which the runs of a sweep differ."""
    return list(dict.fromkeys(key for status in statuses for key in status.values))


def cells(status: RunStatus) -> tuple[str, ...]:
    """Return the row for a run in a table with HEADER."""
    return (
        status.run,
        status.state,
        status.cluster,
        str(status.nodes),
        *progress(status),
        _short(status.reason),
    )


def _short(reason: str) -> str:
    """Shorten a reason for a table. `status` shows the rest."""
    reason = reason.partition("; not restarted")[0]
    return reason if len(reason) <= _MOST_REASON else f"{reason[: _MOST_REASON - 1]}…"
