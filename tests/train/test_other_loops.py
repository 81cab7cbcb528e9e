"""Scripts on Lightning's Trainer, by its callback, and on accelerate, by the three calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.rundir import RunFiles, write_json

from ..warm import torchrun
from .conftest import REPO, make_environment

STEPS = 12


def train(run: RunFiles, script: str, attempt: int = 1, resume: Path | None = None) -> str:
    """Run a script of 12 steps, 4 per epoch, on one worker as an attempt of a run."""
    run.state.mkdir(parents=True, exist_ok=True)
    run.checkpoints.mkdir(exist_ok=True)
    environment = make_environment("cpu", "train", run.path) | {
        "TRNSLURM_ATTEMPT": str(attempt), "TRNSLURM_CHECKPOINTS": str(run.checkpoints),
        "ACCELERATE_USE_CPU": "true", "USE_TORCH_XLA": "0",
    }  # fmt: skip
    words = [
        "--nproc_per_node=1", str(REPO / "tests/project" / script), f"--out={run.checkpoints}",
        "--batch-size=8", *(["--told"] if script == "lit.py" else []),
        *([f"--resume={resume}"] if resume else []),
    ]  # fmt: skip
    done = torchrun(words, cwd=run.path, env=environment, timeout_s=600, xla=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def lines(run: RunFiles) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def weights(run: RunFiles) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint."""
    path = run.newest_checkpoint() or run.path
    if path.is_dir():
        return load_file(path / "model.safetensors")
    return dict(torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("script", ["lit.py", "loop.py"])
def test_it_stops_when_asked_and_goes_on_where_it_was(tmp_path: Path, script: str) -> None:
    """In the middle of an epoch; Lightning before its min_epochs, and without validating first."""
    run, undisturbed = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b")
    run.state.mkdir(parents=True)
    write_json(run.stop_file("train", 1), {"cause": "time limit"})
    train(run, script)
    stopped = json.loads(run.stopped_file("train", 1).read_text())
    assert (stopped["step"], stopped["saved"]) == (1, True)
    assert [(line["step"], "val_loss" in line) for line in lines(run)] == [(1, False)]
    first = run.newest_checkpoint()
    assert first and first.name.startswith(("stopped-step-1", "step-1"))
    train(run, script, 2, first)
    assert run.newest_step() == STEPS
    train(undisturbed, script)
    expected = weights(undisturbed)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())
    last, found = lines(run)[-1], {line["step"]: line for line in lines(undisturbed)}
    assert last["steps"] == STEPS and last["loss"] == found[STEPS]["loss"]
    if script == "lit.py":
        assert [*found] == [1, 2, 4, 6, 8, 10, 12]  # log_every_n_steps
        assert {"loss", "train_loss", "val_loss"} <= found[4].keys() and "val_loss" not in found[2]
        assert last["val_loss"] == found[STEPS]["val_loss"]
        # What the module returned, not its share of a step of two micro-batches.
        assert found[4]["loss"] == pytest.approx(found[4]["train_loss"])
        again = [line["step"] for line in lines(run) if line["attempt"] == 2]
        assert min(again) == 2, "step 1 was reported by the attempt that made it"
