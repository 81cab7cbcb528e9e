"""How long the launcher takes where there are many runs and many jobs.

    .venv/bin/python benchmarks/launcher.py --rounds 5

It makes 2,000 run directories, 500 of them with a job in Slurm's queue. A stand-in for squeue, a
script named so, prints that queue, and one for sbatch a job's number; nothing else of Slurm is
there. Beside times it counts the files that are opened and the commands that are started.
"""

from __future__ import annotations

import getpass
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

SQUEUE = '#!/bin/sh\n# A stand-in for squeue.\necho >> "$0.calls"\ncat "$0.says"\n'
SBATCH = "#!/bin/sh\n# A stand-in for sbatch.\necho Submitted batch job 4242\n"
# Of files and directories of the launcher's site, not those that Python imports.
COUNTER = """
import os, sys
root, counts = sys.argv.pop(1), {"open": 0, "start": 0}
def count(event, details):
    if event in ("open", "os.listdir", "os.scandir") and str(details[0]).startswith(root):
        counts["open"] += 1
    elif event == "subprocess.Popen":
        counts["start"] += 1
sys.addaudithook(count)
from trnslurm.cli import main
try:
    main(sys.argv[1:])
finally:
    print(counts["open"], counts["start"], file=sys.stderr)
"""
SUBMIT = "submit"
COMMANDS = {
    "runs": ["runs"],
    "runs --all": ["runs", "--all"],
    "status last": ["status", "last"],
    "status of a sweep": ["status", "sweep"],
    SUBMIT: ["submit", "gpt2_zero1", "--nodes", "2", "--cluster", "pc", "--yes"],
}
RAW = "sbatch, twice"


def main() -> None:
    """Make the runs, and time and count every command in turn."""
    parser = reporting.make_parser("Measure the launcher beside many runs and jobs.", rounds=5)
    at_least_one = reporting.at_least_one
    parser.add_argument("--runs", type=at_least_one, default=2000, help="run directories (2000)")
    parser.add_argument("--jobs", type=at_least_one, default=500, help="jobs in the queue (500)")
    options = parser.parse_args()
    reporting.require("click", "yaml", "trnslurm")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        environment = make_site(place, options.runs, min(options.jobs, options.runs))
        # The runs that it makes are none of those that the others look at.
        mine = {"XDG_STATE_HOME": str(place / "another"), "TRNSLURM_PATH": str(place / "site")}
        environments = {SUBMIT: environment | mine}
        seconds: dict[str, list[float]] = {name: [] for name in [*COMMANDS, RAW]}
        for _ in range(options.rounds):
            for name, words in COMMANDS.items():
                start = time.perf_counter()
                argv = [sys.executable, "-m", "trnslurm", *words]
                call(argv, environments.get(name, environment))
                seconds[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(2):
                call([str(place / "bin/sbatch"), "train.sbatch"], environment)
            seconds[RAW].append(time.perf_counter() - start)
        rows = []
        for name, words in COMMANDS.items():
            counted = [sys.executable, "-c", COUNTER, str(place), *words]
            done = call(counted, environments.get(name, environment))
            opened, started = map(int, done.splitlines()[-1].split())
            rows.append(
                {"name": name, "s": statistics.median(seconds[name]), "opened": opened,
                 "started": started}
            )  # fmt: skip
        raw = statistics.median(seconds[RAW])
        rows.append({"name": RAW, "s": raw, "opened": None, "started": 2})
    columns = {
        "name": ("", ""), "s": ("s", ".2f"), "opened": ("opened", ","), "started": ("started", ""),
    }  # fmt: skip
    title = f"{options.runs:,} runs, {options.jobs:,} jobs, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def call(argv: list[str], environment: dict[str, str]) -> str:
    """Run a command that must succeed, and return what it said on stderr."""
    done = subprocess.run(
        argv, env=environment, check=False, text=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"error: {argv[-2:]}: {done.stderr}")
    return done.stderr


def make_site(place: Path, runs: int, jobs: int) -> dict[str, str]:
    """Make a run root whose newest runs are a sweep in the queue; return the environment."""
    commands, root, state = place / "bin", place / "runs", place / "state/trnslurm"
    for directory in (commands, root, state):
        directory.mkdir(parents=True)
    (state / "run-roots").write_text(f"{root}\n")
    queue = []
    for number in range(runs):
        waiting = number >= runs - jobs
        name = f"{20260101 + number // 100}-{number % 100:06}-{'sweep' if waiting else 'gpt'}"
        make_run(root / name, str(1000 + number), "20260101-sweep" if waiting else "")
        if waiting:
            queue.append(f"{1000 + number}|RUNNING|None|2026-01-01T00:00:00|node-1|{root / name}")
    for name, script in (("squeue", SQUEUE), ("sbatch", SBATCH)):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    (commands / "squeue.says").write_text("".join(f"{line}\n" for line in queue))
    data = place / "data/wikitext-103"
    data.mkdir(parents=True)
    (data / "index.json").write_text("{}")
    profile = {
        "scheduler": "slurm", "instance_type": "trn1.32xlarge", "python": sys.executable,
        "run_root": str(place / "submitted"), "data_root": str(data.parent),
        "compile_cache": str(place / "cache"),
        "slurm": {"bin_dir": str(commands), "partition": "compute"},
    }  # fmt: skip
    (place / "site/cluster-config").mkdir(parents=True)
    (place / "site/cluster-config/pc.yaml").write_text(json.dumps(profile))
    return {
        **reporting.as_installed(os.environ),
        "HOME": str(place),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(state.parent),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }


def make_run(run: Path, job: str, group: str) -> None:
    """Make the directory of a run after some steps: completed, or running if in a sweep."""
    record: dict[str, Any] = {
        "run": run.name, "name": "gpt", "recipe": "gpt2_zero1", "preset": None, "cluster": "pc",
        "scheduler": "slurm", "nodes": 1, "phases": ["train"], "created": "2026-01-01T00:00:00Z",
        "user": getpass.getuser(), "host": "head", "jobs": {"train": job}, "group": group,
        "values": {"seed": job} if group else {},
    }  # fmt: skip
    attempt = {
        "state": "RUNNING" if group else "COMPLETED", "job_id": job, "hosts": "node-1",
        "started": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    steps = [{"attempt": 1, "step": n, "steps": 500, "loss": 1 / n} for n in range(1, 501)]
    (run / "state").mkdir(mode=0o700, parents=True)
    run.chmod(0o700)
    (run / "run.json").write_text(json.dumps(record))
    (run / "state/train-1.json").write_text(json.dumps(attempt))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))


if __name__ == "__main__":
    main()
