"""How every benchmark says what it measured: a table for people, or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

Row = dict[str, Any]


def make_parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Make a parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help=f"({rounds})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def as_installed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python keeps what it compiles, as where it is installed."""
    return {k: v for k, v in environment.items() if k != "PYTHONDONTWRITEBYTECODE"}


def at_least_one(text: str) -> int:
    """Read a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def require(*modules: str) -> None:
    """End with one line if a module is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            exit_without(name)


def exit_without(module: str | None) -> NoReturn:
    """End with one line that says what is missing."""
    sys.exit(f"error: {module} is not installed here: pip install -e '.[train,dev]'")


def report(title: str, rows: list[Row], columns: dict[str, tuple[str, str]], as_json: bool) -> None:
    """Print rows; columns name a key's heading and format."""
    if as_json:
        result = {"title": title, "cores": os.cpu_count(), "columns": columns, "rows": rows}
        print(json.dumps(result, indent=2))
    else:
        print(f"{title}; {os.cpu_count()} cores\n\n{table(rows, columns)}")


def table(rows: list[Row], columns: dict[str, tuple[str, str]]) -> str:
    """Return rows as lines, in columns."""
    lines = [[heading for heading, _ in columns.values()]]
    for row in rows:
        texts = (
            "-" if row[key] is None else format(row[key], spec)
            for key, (_, spec) in columns.items()
        )
        lines.append(list(texts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for first, *rest in lines:
        right = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        shown.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return "\n".join(shown)
