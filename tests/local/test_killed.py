"""Scripts on five libraries, killed ten times at random, on four workers, then two, then three.

Each micro-batch that counts is compared with runs that are never killed: its samples and loss with
those of one process, and bit for bit its loss and the weights with those of as many workers.
TRNSLURM_SOAK_SEED determines when and what is killed. The driver resumes these local runs;
tests/faults/test_killed_scripts.py has one that Slurm and trnslurm resume.
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
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trnslurm.train.checkpoint.pretrained import load_parameters

from ..processes import alive, run_process
from ..waiting import eventually

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "killed/train.py"
PEERS = ROOT / ".venv-libraries/bin/python"
"""A Python that also has torchtitan: see the Makefile."""
SEED = int(os.environ.get("TRNSLURM_SOAK_SEED", "1"))
WORKERS = (4, 2, 3)
KILLS = 10
LAST = (4, 8)
"""These kills end all processes of the run, which then continues on another number of workers."""
STEPS = 210
FIND_THEIR_OWN = ("torch", "mix", "torchtitan")
"""These look for their checkpoints themselves."""


@dataclass
class Scripts:
    """Runs of the script with one of the libraries, by a user with this home."""

    library: str
    home: Path

    @property
    def records(self) -> Path:
        return self.home / "records"

    @property
    def python(self) -> Path:
        return PEERS if self.library == "torchtitan" else Path(sys.executable)

    @property
    def words(self) -> list[str]:
        """What the script is called with in a run."""
        resume = [] if self.library in FIND_THEIR_OWN else ["--resume", "{resume}"]
        return [self.library, "--records", str(self.records), "--out", "{checkpoints}", *resume]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip

    def control(self, workers: int, until: int, resume: Path | None = None) -> Path:
        """Train up to a step, outside of a run; return the newest checkpoint."""
        out = self.home / f"control{workers if workers == 1 else ''}"
        words = ["--resume", str(resume)] if resume and self.library not in FIND_THEIR_OWN else []
        done = run_process(
            [self.python, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={workers}", SCRIPT, self.library, "--records",
             self.home / f"control-{workers}-{until}", "--out", out, "--until", str(until), *words],
            env=self.environment(),
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        saved = (path for path in out.iterdir() if re.search(r"\d", path.name))
        return max(saved, key=lambda path: int(re.findall(r"\d+", path.name)[-1]))

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

    def reached(self, after: int, steps: int) -> int | None:
        """The newest attempt, if it is a later one than this and has made so many steps."""
        newest = (self.attempts() or [0])[-1]
        return newest if newest > after and self.step(newest) >= steps else None

    def check(self) -> str:
        """Compare what counted in the attempts with runs that were not disturbed."""
        attempts = [read(self.records, attempt) for attempt in self.attempts()]
        workers_of = [len([*self.records.glob(f"{n}-*")]) for n in self.attempts()]
        counted: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        for workers, steps in zip(workers_of, attempts, strict=True):
            for step, lines in steps.items():
                counted[step] = workers, lines
        assert sorted(counted) == list(range(1, STEPS + 1))
        self.control(1, STEPS)
        for step, lines in read(self.home / f"control-1-{STEPS}", 1).items():
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
            checkpoint = self.control(workers, until, checkpoint)
            for step, lines in read(self.home / f"control-{workers}-{until}", 1).items():
                assert (workers, lines) == counted[step], step
        again = sum(len(steps) for steps in attempts) - STEPS
        parts = ", ".join(f"{counted[end][0]} workers until step {end}" for end in [*ends, STEPS])
        return f"{self.library}: {again} steps done again, {parts}"


@dataclass
class Training(Scripts):
    """A local run of the script."""

    rng: random.Random
    kills: list[str] = field(default_factory=list)

    def trnslurm(self, *words: str) -> str:
        done = run_process(
            [self.python, "-m", "trnslurm", *words], env=self.environment(), cwd=self.home
        )
        assert done.code == 0, done
        return done.out

    def submit(self) -> None:
        script = self.home / "train.py"
        script.write_bytes(SCRIPT.read_bytes())
        self.trnslurm(
            "submit", "./train.py", "--nodes", str(WORKERS[0]), "--detach", "--set", "device=cpu",
            "--set", "env.USE_TORCH_XLA='0'", "--", *self.words, "--pause", "0.05",
        )  # fmt: skip

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
    if request.param == "torchtitan" and not PEERS.exists():
        pytest.skip("torchtitan is not installed: make .venv-libraries/.made")
    training = Training(request.param, tmp_path, random.Random(f"{SEED} {request.param}"))
    yield training
    with contextlib.suppress(AssertionError):
        training.trnslurm("cancel", "last", "--now")


LIBRARIES = ["torch", "mix", "accelerate", "lightning", "trainer", "torchtitan"]


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

    print(training.trnslurm("doctor", "last", "--order"))
    print(f"{training.check()} ({seconds:.0f} s)")


@pytest.mark.skipif(not PEERS.exists(), reason="no torchtitan: make .venv-libraries/.made")
def test_what_torchtitan_saved_is_the_same_model_here(tmp_path: Path) -> None:
    """Its next losses are those of transformers' Llama with the parameters that it saved."""
    scripts = Scripts("torchtitan", tmp_path)
    saved = scripts.control(4, 15)
    scripts.control(4, 20)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    load_parameters(model, str(saved))
    tokens = torch.randint(64, (103, 16), generator=torch.Generator().manual_seed(2))
    for line in read(tmp_path / "control-4-20", 1)[16]:
        ids = tokens[line["ids"]]
        loss = nn.functional.cross_entropy(model(ids).logits.mT, ids.roll(-1, 1))
        assert loss.item() == pytest.approx(line["loss"], rel=1e-6)
