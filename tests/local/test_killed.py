"""Scripts on four libraries, killed ten times at random, on four workers, then two, then three.

Each micro-batch that counts is compared with runs that are never killed: its samples and loss with
those of one process, and bit for bit its loss and the weights with those of as many workers.
TRNSLURM_SOAK_SEED determines when and what is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ..processes import alive, run_process
from ..waiting import eventually

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "killed/train.py"
SEED = int(os.environ.get("TRNSLURM_SOAK_SEED", "1"))
WORKERS = (4, 2, 3)
KILLS = 10
LAST = (4, 8)
"""These kills end all processes of the run, which then continues on another number of workers."""
STEPS = 210


@dataclass
class Training:
    """A run of the script with one of the libraries, by a user with this home."""

    library: str
    home: Path
    rng: random.Random
    kills: list[str] = field(default_factory=list)

    @property
    def records(self) -> Path:
        return self.home / "records"

    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip

    def trnslurm(self, *words: str) -> str:
        done = run_process(
            [sys.executable, "-m", "trnslurm", *words], env=self.environment(), cwd=self.home
        )
        assert done.code == 0, done
        return done.out

    def submit(self) -> None:
        script = self.home / "train.py"
        script.write_bytes(SCRIPT.read_bytes())
        resume = () if self.library in ("torch", "mix") else ("--resume", "{resume}")
        self.trnslurm(
            "submit", "./train.py", "--nodes", str(WORKERS[0]), "--detach", "--set", "device=cpu",
            "--set", "env.USE_TORCH_XLA='0'", "--",
            self.library, "--records", str(self.records), "--out", "{checkpoints}", "--pause",
            "0.05", *resume,
        )  # fmt: skip

    def control(self, workers: int, until: int, resume: Path | None = None) -> Path:
        """Train up to a step, outside of a run; return the newest checkpoint."""
        out = self.home / f"control{workers if workers == 1 else ''}"
        words = ["--resume", str(resume)] if resume and self.library not in ("torch", "mix") else []
        done = run_process(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={workers}", SCRIPT, self.library, "--records",
             self.home / f"control-{workers}-{until}", "--out", out, "--until", str(until), *words],
            env=self.environment(),
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        return max(out.iterdir(), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))

    def attempts(self) -> list[int]:
        return sorted({int(file.name.partition("-")[0]) for file in self.records.glob("*-*")})

    def pids(self, attempt: int) -> list[int]:
        files = self.records.glob(f"{attempt}-*")
        heads = [head for file in files if (head := file.read_text().partition("\n")[0])]
        return [pid for head in heads if alive(pid := json.loads(head)["pid"])]

    def step(self, attempt: int) -> int:
        """The steps that an attempt has made after its first, or -1."""
        lines = worker_lines(self.records / f"{attempt}-0")
        return lines[-1]["step"] - lines[0]["step"] if lines else -1

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.trnslurm("status", "last", "--json")))

    def kill(self, *, everything: bool) -> None:
        """Kill a worker of the next attempt, or all processes of the run, at a random moment."""
        attempt = eventually(lambda: self.attempts() or None, 300)[-1]
        if self.kills:
            eventually(lambda: self.attempts()[-1] > self.last, 300, said=self.status)
            attempt = self.attempts()[-1]
        self.last = attempt
        if self.rng.random() < 0.25:  # while it starts
            time.sleep(self.rng.uniform(0, 8))
        else:
            steps = self.rng.randrange(20)
            eventually(lambda: self.step(attempt) >= steps, 300, said=self.status)
            time.sleep(self.rng.uniform(0, 0.3))
        at = self.step(attempt)
        if everything:
            job = json.loads(next(self.home.glob("trnslurm-runs/*/run.json")).read_text())["jobs"]
            pids = family(int(job["local"].partition("@")[0]))
        else:
            pids = [self.rng.choice(eventually(lambda: self.pids(attempt), 60))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        what = "all" if everything else "one worker"
        self.kills.append(f"attempt {attempt}, {at + 1} steps in: {what}")
        print(f"{self.library}: {self.kills[-1]}", flush=True)
        ended = ("FAILED", "LOST", "CANCELLED")  # the last, if its script outlived its guard
        eventually(lambda: self.status()["state"] in ended, 120, said=self.status)


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def worker_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a worker, without its first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True)[1:]
            if line.endswith("\n")]  # fmt: skip


def read(records: Path, attempt: int) -> dict[int, list[dict[str, Any]]]:
    """The micro-batches of an attempt, by step, in the order of the global batch."""
    found: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    for file in records.glob(f"{attempt}-*"):
        rank, count = int(file.name.partition("-")[2]), Counter[int]()
        for line in worker_lines(file):
            found.setdefault(line["step"], []).append((count[line["step"]], rank, line))
            count[line["step"]] += 1
    return {step: [line for *_, line in sorted(all_, key=lambda one: one[:2])]
            for step, all_ in found.items()}  # fmt: skip


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    training = Training(request.param, tmp_path, random.Random(f"{SEED} {request.param}"))
    yield training
    with contextlib.suppress(AssertionError):
        training.trnslurm("cancel", "last", "--now")


LIBRARIES = ["torch", "mix", "accelerate", "lightning", "trainer"]


@pytest.mark.parametrize("training", LIBRARIES, indirect=True)
def test_ten_kills_change_nothing(training: Training) -> None:
    begin = time.monotonic()
    training.submit()
    counts = iter(WORKERS[1:])
    for number in range(1, KILLS + 1):
        training.kill(everything=number in LAST)
        nodes = ("--nodes", str(next(counts))) if number in LAST else ()
        training.trnslurm("resume", "last", *nodes, "--detach")
    eventually(lambda: training.status()["state"] not in ("RUNNING", "PENDING", "RESTARTED"))
    seconds = time.monotonic() - begin
    assert training.status()["state"] == "COMPLETED", training.status()

    attempts = [read(training.records, attempt) for attempt in training.attempts()]
    counts_of = [len([*training.records.glob(f"{n}-*")]) for n in training.attempts()]
    counted: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for workers, steps in zip(counts_of, attempts, strict=True):
        for step, lines in steps.items():
            counted[step] = workers, lines
    assert sorted(counted) == list(range(1, STEPS + 1))
    print(training.trnslurm("doctor", "last", "--order"))
    training.control(1, STEPS)
    for step, lines in read(training.home / f"control-1-{STEPS}", 1).items():
        found, alone = ([line for line in some if line["scale"]]
                        for some in (counted[step][1], lines))  # fmt: skip
        assert [line["ids"] for line in found] == [line["ids"] for line in alone], step
        assert [line["loss"] for line in found] == pytest.approx(
            [line["loss"] for line in alone], rel=1e-4, abs=1e-6
        ), step
    ends = [a for a, b in pairwise(range(1, STEPS + 1)) if counted[a][0] != counted[b][0]]
    checkpoint = None
    for until in [*ends, STEPS]:
        workers = counted[until][0]
        checkpoint = training.control(workers, until, checkpoint)
        for step, lines in read(training.home / f"control-{workers}-{until}", 1).items():
            assert (workers, lines) == counted[step], step
    again = sum(len(steps) for steps in attempts) - STEPS
    print(f"{training.library}: {seconds:.0f} s, {again} steps done again, "
          f"{WORKERS} workers until {[*ends, STEPS]}")  # fmt: skip
