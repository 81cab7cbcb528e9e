"""The table of stages in docs/faults.md is the table of the program."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Any

import pytest

from trnslurm.node.attempt.machine import TABLE, Stage

PAGE = Path(__file__).parents[2] / "docs/faults.md"
BEGIN, END = "<!-- stages -->\n", "<!-- end of stages -->\n"


def words(kind: Any) -> str:
    """Return the name of an event as state/stages.jsonl has it."""
    if isinstance(kind, enum.Enum):
        return str(kind.value)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def table() -> str:
    lines = ["\n| stage | the program | events of this stage |\n|---|---|---|\n"]
    for stage in Stage:
        events = [words(kind) for of, kind in TABLE if of is stage and words(kind) != "tick"]
        lines.append(f"| {stage} | {stage.meaning} | {', '.join(events)} |\n")
    return "".join([*lines, "\n"])


def test_the_stages(request: pytest.FixtureRequest) -> None:
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, end, after = rest.partition(END)
    if request.config.getoption("--update-goldens"):
        PAGE.write_text(f"{before}{begin}{table()}{end}{after}", encoding="utf-8")
        return
    assert shown == table(), "pytest tests/docs/test_stages.py --update-goldens"
