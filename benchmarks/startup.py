"""How long commands take to start, as ratios to the imports that they cannot avoid.

    .venv/bin/python benchmarks/startup.py --rounds 20

All commands run once per round, in turn, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

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
    parser = argparse.ArgumentParser(description="Measure how long commands take to start.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            # No timeout: with one, subprocess looks for the end only every 50 ms.
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    base = statistics.median(times[BASE][1:])  # the first round warms the disk
    print(f"{'':24}{'median ms':>10}{'ratio':>8}")
    for name, seconds in times.items():
        median = statistics.median(seconds[1:])
        print(f"{name:24}{1000 * median:10.0f}{median / base:8.2f}")


if __name__ == "__main__":
    main()
