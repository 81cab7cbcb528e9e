"""How long commands take to start, beside the imports they cannot avoid and torchx's dry run.

    .venv/bin/python benchmarks/startup.py --peer .venv-torchx/bin/python --rounds 20

All commands run once per round, in turn, so that a busy machine slows all of them alike. Times are
of the processor: a wait for the disk, or for another program, is nobody's start-up.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import reporting

BASE = "import jinja2, yaml"
TORCHX = "torchx run --dryrun"
OURS = ["-m", "trnslurm"]
COMPLETION = "completion of a word"
AFRESH = "render, empty cache"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import click": ["-c", "import click"],
    BASE: ["-c", BASE],
    "trnslurm --help": [*OURS, "--help"],
    COMPLETION: OURS,
    "trnslurm runs": [*OURS, "runs"],
    "trnslurm plan": [*OURS, "plan", "gpt2_zero1", "--nodes", "1,2,3,4,8,16"],
    "trnslurm render": [*OURS, "render", "gpt2_zero1", "--nodes", "2"],
    AFRESH: [*OURS, "render", "gpt2_zero1", "--nodes", "2"],
    "import submitit": ["-c", "import submitit"],
}
PEER = ["-m", "torchx.cli.main", "run", "-s", "slurm", "-cfg", "partition=q", "--dryrun"]
PEER += ["dist.ddp", "-j", "2x8", "--script", "train.py"]


def main() -> None:
    """Time every command in turn, and print medians and ratios."""
    parser = reporting.make_parser("Measure how long commands take to start.", rounds=20)
    parser.add_argument("--peer", type=Path, help="a Python that has torchx (none)")
    options = parser.parse_args()
    reporting.require("jinja2", "yaml", "submitit", "trnslurm")
    commands = {name: [sys.executable, *words] for name, words in COMMANDS.items()}
    if options.peer:
        commands[TORCHX] = [str(options.peer.absolute()), *PEER]
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "train.py").touch()  # torchx names it in the script that it prints
        for _ in range(options.rounds + 1):
            for name, argv in commands.items():
                times[name].append(cpu_s(name, argv, directory))
    # The first round warms the disk.
    counted = {name: seconds[1:] for name, seconds in times.items()}
    rows = [
        {"name": name, "ms": 1000 * statistics.median(mine)}
        | {key: ratio(mine, counted.get(other)) for key, other in (("base", BASE), ("x", TORCHX))}
        for name, mine in counted.items()
    ]
    columns = {
        "name": ("", ""), "ms": ("ms", ".0f"), "base": (BASE, ".2f"), "x": ("torchx", ".2f"),
    }  # fmt: skip
    title = f"Start-up, medians of {options.rounds} rounds, and ratios"
    reporting.report(title, rows, columns, options.json)


def cpu_s(name: str, argv: list[str], directory: str) -> float:
    """Run a command, and return the processor's time that it took."""
    environment = reporting.as_installed(os.environ)
    if name == COMPLETION:
        words = {"COMP_WORDS": "trnslurm su", "COMP_CWORD": "1"}
        environment |= {"_TRNSLURM_COMPLETE": "bash_complete", **words}
    if name == AFRESH:
        environment["XDG_CACHE_HOME"] = os.devnull
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        argv, cwd=directory, env=environment, check=False, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"error: {name}: {done.stderr.decode(errors='replace')}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def ratio(mine: list[float], others: list[float] | None) -> float | None:
    """Return the median of the ratios within a round; None without a peer."""
    if others is None:
        return None
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


if __name__ == "__main__":
    main()
