"""Trainings whose checkpoints are copied to S3, and go on from there; real, on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ..processes import Done
from ..waiting import eventually
from .server import BUCKET, Server

pytestmark = pytest.mark.rest

STEPS, EVERY = 300, 30
TRAINING = (
    *("gpt2_zero1", "--cluster", "local", "--set", "device=cpu", "--set", f"steps={STEPS}"),
    *("--set", f"train.save_every={EVERY}", "--set", "train.eval_every=0"),
)

Cli = Callable[..., Done]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run root"


def losses(run_cli: Cli, run: Path | str = "last") -> dict[int, float]:
    """Return the loss of each step, every bit of it."""
    lines = json.loads(run_cli("metrics", run, "--json").ok)
    return {line["step"]: line["loss"] for line in lines}


def steps_in_s3(server: Server, run: str) -> list[int]:
    copies = re.compile(rf"runs/{re.escape(run)}/checkpoints/step-(\d+)\.json")
    return sorted(int(found[1]) for key in server.sizes() if (found := copies.fullmatch(key)))


_ALONE: dict[int, float] = {}


@pytest.fixture
def alone(run_cli: Cli, tmp_path: Path) -> dict[int, float]:
    """The losses of the training without a mirror."""
    if not _ALONE:
        ran = run_cli("submit", *TRAINING, "--set", f"run_root={tmp_path / 'alone'}")
        assert ran.code == 0, ran
        _ALONE.update(losses(run_cli))
    assert list(_ALONE) == list(range(1, STEPS + 1))
    return _ALONE


def test_faults_of_s3_are_no_faults_of_the_training(
    server: Server, run_cli: Cli, root: Path, alone: dict[int, float]
) -> None:
    server.gate.bytes_per_s = 100_000
    mirror = ("--set", f"mirror=s3://{BUCKET}/runs", "--set", "mirror_wait_min=0.05")
    started = run_cli("submit", *TRAINING, "--set", f"run_root={root}", *mirror, "--detach")
    assert started.code == 0, started
    run = max(root.iterdir())
    before = server.gate.received
    eventually(lambda: server.gate.received > before + 200_000)
    server.gate.cut()  # in the middle of a file
    eventually(lambda: json.loads(run_cli("status", run, "--json").ok)["state"] != "RUNNING")
    assert losses(run_cli, run) == alone
    status = run_cli("status", run).ok
    assert ": COMPLETED" in status
    assert (
        f"mirror: nothing in s3://{BUCKET}/runs/{run.name}; step {STEPS} has not been copied since "
        in status
    )
    log = run_cli("logs", run, "--batch").ok
    assert f"warning: the checkpoint of step {STEPS} is not in S3: " in log


def test_it_goes_on_where_its_files_are_gone(
    server: Server,
    run_cli: Cli,
    root: Path,
    tmp_path: Path,
    home: Path,
    alone: dict[int, float],
) -> None:
    mirror = ("--set", f"mirror=s3://{BUCKET}/runs/", "--set", f"run_root={root}")
    started = run_cli("submit", *TRAINING, *mirror, "--detach")
    assert started.code == 0, started
    run = max(root.iterdir())
    eventually(lambda: steps_in_s3(server, run.name))
    run_cli("cancel", "--now", run)
    eventually(lambda: json.loads(run_cli("status", run, "--json").ok)["state"] == "CANCELLED")
    shutil.rmtree(root)
    shutil.rmtree(home / ".local")

    (saved,) = steps_in_s3(server, run.name)[-1:]
    place = f"s3://{BUCKET}/runs/{run.name}"
    resumed = run_cli("resume", place, "--set", f"run_root={tmp_path / 'elsewhere'}")
    assert resumed.code == 0, resumed
    assert f"{run.name} continues after step {saved} from {place}" in resumed.err
    again = losses(run_cli)
    assert list(again) == list(range(saved + 1, STEPS + 1))
    assert again == {step: loss for step, loss in alone.items() if step > saved}
    status = run_cli("status", "last").ok
    assert f"continues {place}" in status
    assert f"mirror: step {STEPS} is in s3://{BUCKET}/runs/" in status
    assert steps_in_s3(server, run.name)[-1] == saved
