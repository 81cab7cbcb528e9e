"""How long commands take to start, as ratios to the imports that they cannot avoid.

    .venv/bin/python benchmarks/startup.py --rounds 20

All commands run once per round, in turn, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import reporting

BASE = "import jinja2, yaml"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    BASE: ["-c", BASE],
    "import trnslurm.cli": ["-c", "import trnslurm.cli"],
    "trnslurm --version": ["-m", "trnslurm", "--version"],
    "trnslurm plan": ["-m", "trnslurm", "plan", "gpt2_zero1", "--nodes", "1,2,3,4,8,16"],
    "trnslurm render": ["-m", "trnslurm", "render", "gpt2_zero1", "--nodes", "2"],
    "import submitit": ["-c", "import submitit"],
}


def main() -> None:
    """Time every command in turn, and print medians and ratios."""
    options = reporting.make_parser(
        "Measure how long commands take to start.", rounds=20
    ).parse_args()
    reporting.require("jinja2", "yaml", "submitit", "trnslurm")
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            # No timeout: with one, subprocess looks for the end only every 50 ms.
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    # The first round warms the disk.
    counted = {name: seconds[1:] for name, seconds in times.items()}
    rows = []
    for name, mine in counted.items():
        pairs = zip(mine, counted[BASE], strict=True)
        row = {
            "name": name,
            "ms": 1000 * statistics.median(mine),
            "ratio": statistics.median(seconds / base for seconds, base in pairs),
        }
        rows.append(row)
    columns = {"name": ("", ""), "ms": ("ms", ".0f"), "ratio": ("ratio", ".2f")}
    title = f"Start-up, medians of {options.rounds} rounds; ratio to {BASE}"
    reporting.report(title, rows, columns, options.json)


if __name__ == "__main__":
    main()
