"""Tables of metrics with a step column, such as the metrics.csv of Lightning's CSVLogger."""

from __future__ import annotations

import csv

from trnslurm.node.numbers.names import canonical, with_loss
from trnslurm.node.numbers.sighting import Sighting

NAME = "metrics.csv"
_STEP = ("step", "global_step")


def rows(text: str) -> list[Sighting]:
    """Return what each complete line of a table says, or nothing if the table has no steps."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        table = [*csv.reader(lines)]
    except csv.Error:
        return []
    names = [name.strip() for name in table[0]] if table else []
    step_at = next((names.index(name) for name in _STEP if name in names), None)
    if step_at is None:
        return []
    found = []
    for row in table[1:]:
        if len(row) != len(names) or not row[step_at].isdigit():
            continue
        numbers = {}
        for at, (name, cell) in enumerate(zip(names, row)):
            if at != step_at and (value := _number(cell)) is not None:
                numbers[canonical(name)] = value
        if named := with_loss(numbers):
            found.append(Sighting(int(row[step_at]), named))
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
