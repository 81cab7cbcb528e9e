"""Attempts of a run as its batch script would start them, with what may happen to them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ..json_lines import read_lines
from ..waiting import eventually
from .conftest import (
    JOB,
    launcher_words,
    make_environment,
    node_environment,
    run_workers,
    tiny_plan,
    torchrun_arguments,
)

SCRIPT = JOB / "train.py"

TIMEOUT_S = 600


def children(pid):
    """The processes that a process has started and that have not ended."""
    listing = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in listing for child in children.read_text().split()]


class Run:
    """A run directory."""

    def __init__(self, path, workers=2, **changes):
        self.path = path
        self.workers = workers
        (path / "state").mkdir(parents=True)
        (path / "plan.json").write_text(json.dumps(tiny_plan("cpu", 1, workers, **changes)))

    def undisturbed(self, number=1, *, code=0):
        """Have an attempt to which nothing happens; give what it printed."""
        done = run_workers(
            self.workers, SCRIPT, "plan.json", cwd=self.path, TRNSLURM_ATTEMPT=str(number)
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def lines(self):
        return read_lines(self.path / "metrics.jsonl")

    @contextlib.contextmanager
    def attempt(self, number, *, torchrun=False):
        """Start it; whatever happens, no process stays."""
        environment = make_environment("cpu", "train", self.path) | node_environment()
        words = launcher_words(self.workers, SCRIPT, "plan.json")
        if torchrun:
            words = ["-m", "trnslurm.node.torchrun"]
            words += torchrun_arguments(self.workers, SCRIPT, "plan.json")
        with (self.path / f"{number}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.path,
                env=environment | {"TRNSLURM_ATTEMPT": str(number)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        attempt = Attempt(self, number, process)
        try:
            yield attempt
        finally:
            for pid in [process.pid, *attempt.pids.values()]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
            process.wait()

    def state(self, name):
        """What a file in the state directory says, or None if it is not there."""
        path = self.path / "state" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def checkpoints(self):
        return [int(path.name[5:]) for path in sorted((self.path / "checkpoints").glob("step-*"))]

    def log(self, number):
        return (self.path / f"{number}.log").read_text()


class Attempt:
    """One that is under way."""

    def __init__(self, run, number, process):
        self.run = run
        self.number = number
        self.process = process
        self.pids = {}
        """Of the workers, by rank; known once one has reached a step."""

    def reach(self, step):
        """Wait until it has reported a step."""
        want = [self.number, step]

        def there():
            return want in [[line["attempt"], line["step"]] for line in self.run.lines()]

        self.wait_for(there, f"step {step}")
        self._find_workers()

    def wait_for(self, there, what):
        def there_or_ended():
            return there() or self.process.poll() is not None

        eventually(there_or_ended, TIMEOUT_S, said=self.text)
        assert there(), f"ended before {what}: {self.text()}"

    def ask_to_stop(self):
        path = self.run.path / "state" / f"stop-train-{self.number}.json"
        path.write_text('{"cause": "terminated", "time": 0}')

    def terminate(self):
        self.process.terminate()

    def signal(self, rank, number):
        os.kill(self.pids[rank], number)

    def end(self):
        """Wait for the end; give the exit code."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.text()}") from None

    def text(self):
        return self.run.log(self.number)

    def _find_workers(self):
        for pid in children(self.process.pid):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            self.pids.update(dict.fromkeys(ranks, pid))
