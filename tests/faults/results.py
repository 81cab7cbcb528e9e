"""What the rows of the matrix showed, a JSON file each, from which docs/reliability.md is made."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .trainings import Recovery

VARIABLE = "TRNSLURM_FAULT_RESULTS"


@dataclass
class Row:
    """One row: what it was, and what holds."""

    number: int
    what: str
    invariants: list[str] = field(default_factory=list)
    lost: int | None = None
    """Steps done again; None where nothing was to be gone on with."""
    bound: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: str = ""

    def holds(self, invariants: str, *, lost: int | None = None, bound: int | None = None) -> None:
        """Take down which invariants hold, and how many steps were lost of how many allowed."""
        self.invariants, self.lost, self.bound = invariants.split(), lost, bound

    def measured(self, recovery: Recovery) -> None:
        """Take a recovery down."""
        parts = ("detection", "requeue", "start", "load", "total")
        self.seconds = {part: round(getattr(recovery, part), 1) for part in parts}

    def write(self, directory: Path) -> None:
        """Write it down; the newest word on a row counts."""
        file = directory / f"row-{self.number:02d}-{_slug(self.what)}.json"
        values: dict[str, Any] = asdict(self)
        file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def results_directory() -> Path:
    """Where results go: where the Makefile says, or nowhere that stays."""
    directory = Path(os.environ.get(VARIABLE) or tempfile.mkdtemp(prefix="fault-results-"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())[:40]
