"""What a custom script tells a run, and asks it: in files, and without PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trnslurm
from trnslurm import calls
from trnslurm.contract.checkpoints import newest_checkpoint, newest_step
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles

from ..processes import run_process


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A run in whose second attempt this process is a worker."""
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TRNSLURM_PHASE", "train")
    monkeypatch.setenv("TRNSLURM_ATTEMPT", "2")
    monkeypatch.setattr(calls, "_worker", None)
    monkeypatch.setattr(calls._Worker, "_follow_term", lambda worker: None)
    return RunFiles(tmp_path)


def lines(run: RunFiles) -> list[dict[str, object]]:
    found = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


def test_outside_a_run_nothing_happens(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRNSLURM_RUN_DIR", raising=False)
    trnslurm.report(step=1, loss=2.0)
    trnslurm.saved(1, "x")
    assert trnslurm.should_stop() is False
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rung_ends(run: RunFiles, monkeypatch, rank: str) -> None:
    """At once, and for all workers: each has reported the step."""
    monkeypatch.setenv("RANK", rank)
    write_json(run.rung_file, {"rung": 1, "rungs": 2, "stop_at": 5})
    asked = []
    for step in range(1, 8):
        trnslurm.report(step=step)
        asked.append(trnslurm.should_stop())
    assert asked == [False] * 4 + [True] * 3
    assert not run.stopped_file("train", 2).exists()  # nobody has asked it to
    monkeypatch.setattr(calls, "_worker", None)
    write_json(run.rung_file, {"rung": 2, "rungs": 2, "stop_at": 5})
    trnslurm.report(step=5)
    assert not trnslurm.should_stop()  # the script ends by itself


def test_worker_0_reports(run: RunFiles, monkeypatch) -> None:
    trnslurm.report(step=1, steps=9, loss=0.5, lr=1)
    trnslurm.report(step=2, loss=0.25)
    assert lines(run) == [
        {"attempt": 2, "step": 1, "steps": 9, "loss": 0.5, "lr": 1.0},
        {"attempt": 2, "step": 2, "loss": 0.25},
    ]
    monkeypatch.setattr(calls, "_worker", None)
    monkeypatch.setenv("RANK", "1")
    trnslurm.report(step=3)
    trnslurm.saved(3)
    assert len(lines(run)) == 2 and not run.saved_file.exists()


def test_what_is_saved_is_what_the_next_attempt_begins_with(run: RunFiles, monkeypatch) -> None:
    assert (newest_step(run), newest_checkpoint(run)) == (0, None)
    (run.path / "mine").mkdir()
    monkeypatch.chdir(run.path)
    trnslurm.saved(5, "mine")
    assert (newest_step(run), newest_checkpoint(run)) == (5, run.path / "mine")
    own = run.checkpoints / "step-00000007"
    own.mkdir(parents=True)
    assert (newest_step(run), newest_checkpoint(run)) == (7, own)
    trnslurm.saved(9, "gone")  # by whoever cleans up
    assert newest_checkpoint(run) == own
    run.saved_file.write_text("[")
    assert (newest_step(run), newest_checkpoint(run)) == (7, own)


def test_a_stop_is_told_to_the_batch_script(run: RunFiles) -> None:
    assert trnslurm.should_stop() is False
    write_json(run.stop_file("train", 1), {})  # another attempt's
    assert not any(trnslurm.should_stop() for _ in range(10))
    write_json(run.stop_file("train", 2), {"cause": "time limit"})
    while not trnslurm.should_stop():
        pass
    said = json.loads(run.stopped_file("train", 2).read_text())
    assert (said["step"], said["saved"]) == (0, False)
    trnslurm.saved(12)
    said = json.loads(run.stopped_file("train", 2).read_text())
    assert (said["step"], said["saved"]) == (12, True)


WORKER = """
import os, sys, time, trnslurm
trnslurm.should_stop()
print("there", flush=True)
while not trnslurm.should_stop():
    time.sleep(0.01)
trnslurm.saved(3)
print("stopped", flush=True)
"""


@pytest.mark.parametrize("asked", [True, False])
def test_term_ends_a_worker_unless_a_stop_is_asked_for(tmp_path: Path, asked: bool) -> None:
    run = RunFiles(tmp_path)
    run.state.mkdir()
    environment = {
        "PYTHONPATH": str(Path(trnslurm.__file__).parents[1]), "TRNSLURM_RUN_DIR": str(tmp_path),
        "TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "1", "PATH": os.environ["PATH"],
    }  # fmt: skip
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout
    assert worker.stdout.readline() == "there\n"
    if asked:
        write_json(run.stop_file("train", 1), {})
    worker.send_signal(signal.SIGTERM)
    out, _ = worker.communicate(timeout=600)
    assert (out, worker.returncode) == (("stopped\n", 0) if asked else ("", 128 + signal.SIGTERM))
    assert run.stopped_file("train", 1).exists() == asked


def test_short_steps_are_not_each_held_up(run: RunFiles, monkeypatch) -> None:
    """The workers come together about once a second, and never less often than every 1000 calls."""
    looks, clock = [], iter(n * 1e-4 for n in range(100_000))
    monkeypatch.setattr(calls.time, "monotonic", lambda: next(clock))
    real = calls._Worker._agree
    monkeypatch.setattr(calls._Worker, "_agree", lambda w: looks.append(1) or real(w))
    for _ in range(5000):
        trnslurm.should_stop()
    assert 5 < len(looks) < 30


def test_the_names_are_there_without_the_launcher() -> None:
    """On a node: the snapshot has no more of trnslurm than its standard-library files."""
    code = (
        "import sys, trnslurm; trnslurm.report; "
        "print(sorted(m for m in sys.modules if m.startswith('trnslurm')))"
    )
    done = run_process([sys.executable, "-c", code])
    needed = [
        *("trnslurm", "trnslurm.calls", "trnslurm.contract"),
        *(f"trnslurm.contract.{each}" for each in ("checkpoints", "files", "halving", "meant")),
        *(f"trnslurm.contract.{each}" for each in ("roles", "rundir", "variables")),
        *("trnslurm.frozen", "trnslurm.tracing"),
    ]
    assert done.ok.strip() == str(needed)
