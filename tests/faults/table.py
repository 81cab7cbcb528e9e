"""Write the results of `make test-faults` and `make soak` into docs/reliability.md.

    python tests/faults/table.py RESULTS docs/reliability.md

Between the file's markers stands nothing but what was measured: rows that have no result there are
rows that did not pass.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PARTS = ("detection", "requeue", "start", "load", "total")


def main() -> None:
    """Read the rows, and replace what stands between the markers."""
    results, page = map(Path, sys.argv[1:])
    rows = [json.loads(file.read_text()) for file in sorted(results.glob("row-*.json"))]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rows or not after:
        sys.exit(f"error: no results in {results}, or no markers in {page}")
    lines = [where_and_when(), "", *table(rows)]
    page.write_text("\n".join([before + BEGIN, *lines, END]) + after, encoding="utf-8")


def where_and_when() -> str:
    """The machine, in words."""
    slurm = subprocess.run(
        ["slurmctld", "-V"], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
    ).stdout.strip()  # fmt: skip
    memory = re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    assert memory
    return (
        f"{datetime.date.today():%Y-%m-%d}, {slurm}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores, {int(memory[1]) / 2**20:.0f} GiB of memory."
    )


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per row."""
    return [
        f"| row | fault | steps lost (allowed) | {', '.join(PARTS)} (s) | invariants |",
        "|---|---|---|---|---|",
        *(f"| {r['number']} | {r['what']} | {lost(r)} | {seconds(r)} | {holds(r)} |" for r in rows),
    ]


def lost(row: dict[str, Any]) -> str:
    """Steps done again, of those that may have to be."""
    return f"{row['lost']} ({row['bound']})" if row["lost"] is not None else ""


def seconds(row: dict[str, Any]) -> str:
    """The parts of the way back, and their sum."""
    if not row["seconds"]:
        return str(row["notes"])
    *parts, total = (f"{row['seconds'][part]:.1f}" for part in PARTS)
    return f"{' + '.join(parts)} = {total}"


def holds(row: dict[str, Any]) -> str:
    """The invariants, consecutive ones as a range: I1–I4, I6."""
    ranges: list[list[int]] = []
    for number in sorted(int(name.removeprefix("I")) for name in row["invariants"]):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"I{r[0]}–I{r[-1]}" if r[1:] else f"I{r[0]}" for r in ranges)


if __name__ == "__main__":
    main()
