"""Draw a metric over steps as text, in braille: each character has two by four dots."""

from __future__ import annotations

from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ROWS = 16
_LEAST_WIDTH = 20
Points = Sequence[tuple[float, float]]
"""Step and value, in the order of steps."""


def curve_lines(
    points: Points, *, title: str, width: int, marks: Sequence[float] = (), marked: str = ""
) -> list[str]:
    """Return the lines of a curve with axes, `width` characters wide.

    Where there are more steps than columns, a column shows the range of its steps.
    `marks` are steps to mark on the axis, and `marked` explains the marks.
    """
    values = [value for _, value in points]
    low, high = min(values), max(values)
    first, last = points[0][0], points[-1][0]
    labels = {0: _said(high), _ROWS // 2: _said((low + high) / 2), _ROWS - 1: _said(low)}
    margin = max(map(len, labels.values())) + 1
    columns = max(_LEAST_WIDTH, width - margin - 1)
    across, down = 2 * columns - 1, 4 * _ROWS - 1

    def x_of(step: float) -> int:
        return round((step - first) / ((last - first) or 1) * across)

    def y_of(value: float) -> int:
        return round((high - value) / ((high - low) or 1) * down) if high > low else down // 2

    cells = [[0] * columns for _ in range(_ROWS)]
    before = (x_of(first), y_of(values[0]))
    for step, value in points:
        here = (x_of(step), y_of(value))
        for x, y in _between(before, here):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        before = here
    axis = ["─"] * columns
    for step in marks:
        axis[x_of(step) // 2] = "┼"
    lines = [title]
    for row, cell in enumerate(cells):
        dots = "".join(chr(0x2800 + bits) if bits else " " for bits in cell).rstrip()
        lines.append(f"{labels.get(row, ''):>{margin - 1}} {'┤' if row in labels else '│'}{dots}")
    lines.append(f"{'':>{margin}}└{''.join(axis)}")
    middle = f"step {(first + last) / 2:.0f}" if last - first > 1 else ""
    begin, end = f"{first:.0f}", f"{last:.0f}"
    gap = columns - len(begin) - len(end)
    lines.append(f"{'':>{margin + 1}}{begin}{middle:^{gap}}{end}".rstrip())
    return [*lines, *([f"{'':>{margin + 1}}┼ {marked}"] if marks and marked else [])]


def _between(one: tuple[int, int], other: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Return the dots of the line from one dot to another."""
    (x0, y0), (x1, y1) = one, other
    steps = max(abs(x1 - x0), abs(y1 - y0)) or 1
    return [
        (round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps))
        for n in range(steps + 1)
    ]


def _said(value: float) -> str:
    return f"{value:.4g}"
