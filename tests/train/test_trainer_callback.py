"""A script on Hugging Face's Trainer, with the one callback that keeps a run's contract."""

from __future__ import annotations

import json
from pathlib import Path

from trnslurm.rundir import RunFiles, write_json

from ..warm import torchrun
from .conftest import REPO, make_environment

SCRIPT = REPO / "tests/project/glue.py"


def train(run: RunFiles, attempt: int = 1, resume: Path | None = None) -> str:
    """Run the script on two workers as an attempt of a run.

    Without the callback it could not load its optimizer again there.
    """
    run.state.mkdir(parents=True, exist_ok=True)
    environment = make_environment("cpu", "train", run.path) | {
        "TRNSLURM_ATTEMPT": str(attempt), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    words = [
        "--nproc_per_node=2", str(SCRIPT), "--told", f"--output_dir={run.checkpoints}",
        "--max_steps=6", "--save_steps=4", "--logging_steps=2", "--report_to=none",
        "--per_device_train_batch_size=2", "--gradient_accumulation_steps=2", "--disable_tqdm=True",
        *([f"--resume_from_checkpoint={resume}"] if resume else []),
    ]  # fmt: skip
    done = torchrun(words, cwd=run.path, env=environment, timeout_s=600, xla=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def lines(run: RunFiles) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def test_trainer_stops_when_asked_and_goes_on_where_it_was(tmp_path: Path) -> None:
    run, undisturbed = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b")
    run.state.mkdir(parents=True)
    write_json(run.stop_file("train", 1), {"cause": "time limit"})
    train(run)  # it ends after its first step
    stopped = json.loads(run.stopped_file("train", 1).read_text())
    assert (stopped["step"], stopped["saved"]) == (1, True)
    assert run.newest_checkpoint() == run.checkpoints / "checkpoint-1"
    train(run, 2, run.newest_checkpoint())
    assert run.newest_step() == 6
    train(undisturbed)
    last = [files.checkpoints / "checkpoint-6/model.safetensors" for files in (run, undisturbed)]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert next((line["attempt"], line["step"]) for line in lines(run)) == (1, 1)
    losses = {line["step"]: line["loss"] for line in lines(undisturbed) if "loss" in line}
    assert [*losses] == [2, 4, 6] and lines(undisturbed)[-1]["steps"] == 6
    assert losses[6] == next(line["loss"] for line in lines(run) if line["step"] == 6)
