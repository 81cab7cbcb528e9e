"""How long each file of tests takes: recorded in durations.json, which orders the files.

    make durations     # after a change of what takes long

The longest files come first, so that no process ends alone with one of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORD = HERE / "durations.json"


class Recorder:
    """A plugin that adds up the seconds of each file, and writes them down at the end."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace the seconds of the files that have run; forget files that are gone."""
        known = {file: s for file, s in recorded().items() if (HERE / file).exists()}
        known |= {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        slowest_first = dict(sorted(known.items(), key=lambda item: (-item[1], item[0])))
        RECORD.write_text(json.dumps(slowest_first, indent=0) + "\n")


def recorded() -> Mapping[str, float]:
    """Return file -> seconds."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def sort(items: list[pytest.Item]) -> None:
    """Put the items of the slowest files first, and before them those of files without a record."""
    seconds = recorded()
    items.sort(key=lambda item: -seconds.get(str(item.path.relative_to(HERE)), float("inf")))
