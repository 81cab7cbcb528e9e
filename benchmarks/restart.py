"""From the death of a worker to the first new step, part by part, beside the imports alone.

    .venv/bin/python benchmarks/restart.py --rounds 3 [--warm] [--launcher torchrun]

A sandbox, a real Slurm on this machine, trains gpt2_zero1 (tiny, on the CPU) on two nodes of one
worker. One worker is killed, and the job starts the next attempt on the same nodes. What is seen
from outside divides the time: processes, state files, the log of the first node, and the time in
metrics.jsonl. The goal is 1.3 times the import of torch and of the model's code; with --warm, which
waits until the next workers have been started ahead and have imported, 0.4 times. `--launcher`
starts the workers by another launcher than trnslurm's own.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import reporting
import scale

from trnslurm.contract.checkpoints import newest_in

IMPORTS = "import torch; from transformers import GPT2Config, GPT2LMHeadModel"
GOAL, WARM_GOAL = 1.3, 0.4
IMPORT = "import torch, transformers"
IMPORTED_S = 15.0
"""How long workers that were started ahead import, at most."""
WORKER = b"-u\0code/jobs/gpt2_zero1/train.py"


def main() -> None:
    """Kill a worker in every round, and print the median of each part."""
    parser = reporting.make_parser("Measure the way back after a worker's death.", rounds=3)
    parser.add_argument("--warm", action="store_true", help="with workers that were started ahead")
    parser.add_argument("--launcher", default="trnslurm", choices=("trnslurm", "torchrun"))
    options = parser.parse_args()
    reporting.require("torch", "transformers")
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="restart-", dir="/tmp") as directory:
            site = Training(Path(directory), options.launcher)
            rounds.append(measure(site, warm=options.warm) | {IMPORT: time_imports()})
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    alone = found.pop(IMPORT)
    whole = statistics.median(sum(v for k, v in one.items() if k != IMPORT) for one in rounds)
    rows = [{"name": name, "s": value, "imports": value / alone} for name, value in found.items()]
    goal = WARM_GOAL if options.warm else GOAL
    rows += [
        {"name": f"all (goal {goal})", "s": whole, "imports": whole / alone},
        {"name": f"{IMPORT}, alone", "s": alone, "imports": 1.0},
    ]
    columns = {"name": ("", ""), "s": ("s", ".2f"), "imports": ("to imports", ".2f")}
    title = f"From a worker's death to the first new step, medians of {options.rounds} rounds"
    reporting.report(title, rows, columns, options.json)


def time_imports() -> float:
    """Return the seconds of the imports, in a Python of their own."""
    # Without it transformers imports torch_xla, which a training on a CPU does not need.
    environ = os.environ | {"USE_TORCH_XLA": "0"}
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], env=environ, check=True)
    return time.monotonic() - start


def measure(site: Training, *, warm: bool) -> dict[str, float]:
    """Train, kill a worker, and return the seconds of each part until the first new step."""
    settings = [word for setting in scale.SETTINGS for word in ("--set", setting)]
    up = ["sandbox", "up", "--nodes", "2", *settings, "--owner", str(os.getpid()), "--quiet"]
    site.trnslurm(*up)
    try:
        site.enter()
        site.submit()
        # From a checkpoint, so that there is something to load.
        site.wait("a checkpoint", lambda: newest_in(site.run / "checkpoints") > 0)
        killed = site.workers()[0]  # the order of /proc: those started ahead come later
        if warm:
            site.wait("workers started ahead", lambda: len(site.workers()) == 4)
            time.sleep(IMPORTED_S)
        os.kill(killed, signal.SIGKILL)
        begun = time.time()
        return site.warm_parts(begun) if warm else site.parts(begun)
    finally:
        site.trnslurm("sandbox", "down")


class Training(scale.Site):
    """A sandbox on which gpt2_zero1 trains."""

    def __init__(self, place: Path, launcher: str) -> None:
        super().__init__(place, 2)
        self._root, self._launcher = place / "runs", launcher

    def submit(self) -> None:
        """Submit a training that is longer than this takes."""
        words = ["submit", "gpt2_zero1", "--nodes", "2", "--workers", "1", "--preset", "tiny"]
        for setting in ("device=cpu", "steps=100000", f"run_root={self._root}"):
            words += ["--set", setting]
        words += ["--launcher", self._launcher]
        self.run = Path(json.loads(self.trnslurm(*words, "--yes", "--json"))["directory"])

    def parts(self, begun: float) -> dict[str, float]:
        """Watch what follows upon a death; return the seconds of each part."""
        log = self.run / "logs/train-2-node0.log"
        return self._seconds(begun, {
            "all workers are gone": lambda: not self.workers(),
            "the attempt ends: triage": lambda: self.state(1) not in ("", "RUNNING"),
            "batch script": lambda: self.state(2) == "RUNNING",
            "preflight": lambda: (self.run / "state/preflight-train-2.json").exists(),
            "launcher": lambda: len(self.workers()) > 0,
            "imports, model, data": lambda: said(log, b"steps  "),
            "load the checkpoint": lambda: said(log, b"resuming from"),
        })  # fmt: skip

    def warm_parts(self, begun: float) -> dict[str, float]:
        """Return those of workers that have imported before."""
        return self._seconds(begun, {
            "the attempt ends: triage": lambda: self.state(1) not in ("", "RUNNING"),
            "the gate opens": lambda: self.state(2) == "RUNNING",
        })  # fmt: skip

    def _seconds(self, begun: float, marks: dict[str, Callable[[], bool]]) -> dict[str, float]:
        found, last = {}, begun
        for name, there in marks.items():
            self.wait(name, there)
            now = time.time()
            found[name], last = now - last, now
        self.wait("a new step", lambda: self.first_step() > 0)
        found["first step"] = self.first_step() - last
        return found

    def workers(self) -> list[int]:
        """Return the processes of the workers, on all nodes."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if WORKER in file.read_bytes() and (file.parent / "cwd").readlink() == self.run:
                    found.append(int(file.parent.name))
            except OSError:
                continue
        return found

    def state(self, attempt: int) -> str:
        """Return the word that an attempt has written of itself; empty if there is none."""
        try:
            text = (self.run / f"state/train-{attempt}.json").read_text()
        except OSError:
            return ""
        try:
            return str(json.loads(text)["state"])
        except (ValueError, KeyError):
            return "STARTING"

    def first_step(self) -> float:
        """Return when the second attempt had done its first step; 0 if it has not."""
        for line in (self.run / "metrics.jsonl").read_text().splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if told["attempt"] == 2:
                return float(told["time"])
        return 0.0


def said(log: Path, words: bytes) -> bool:
    """Check whether a log has some words."""
    try:
        return words in log.read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    main()
