"""Scripts on the Trainers of Hugging Face and Lightning by their callbacks, on accelerate, on none.

All but glue.py are examples that users copy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trnslurm
from trnslurm.contract.checkpoints import newest_checkpoint, newest_step
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.records.run import RunDir
from trnslurm.runs.order import check_order

from ..json_lines import read_lines
from .conftest import REPO, run_workers

pytestmark = pytest.mark.rest

EXAMPLES = REPO / "trnslurm/examples"
STEPS = 12
TRAINER = (
    "--max_steps=6", "--save_steps=4", "--logging_steps=2", "--report_to=none",
    "--per_device_train_batch_size=2", "--gradient_accumulation_steps=2", "--disable_tqdm=True",
)  # fmt: skip
ON_TRAINER = {"glue": ("--told", *TRAINER), "lora": TRAINER}


def train(run: RunFiles, script: str, attempt: int = 1, resume: Path | None = None) -> None:
    """Run a script as an attempt of a run: of 12 steps, 4 per epoch, or 6 on Trainer.

    On Trainer it has two workers: without the callback it could not load its optimizer again there.
    """
    run.state.mkdir(parents=True, exist_ok=True)
    run.checkpoints.mkdir(exist_ok=True)
    if script in ON_TRAINER:
        words = [*ON_TRAINER[script], f"--output_dir={run.checkpoints}"]
        words += [f"--resume_from_checkpoint={resume}"] if resume else []
    else:
        words = [f"--out={run.checkpoints}", "--batch-size=8"]
        words += [f"--resume={resume}"] if resume else []
    file = REPO / "tests/project/glue.py" if script == "glue" else EXAMPLES / script / "train.py"
    done = run_workers(
        2 if script in ON_TRAINER else 1, file, *words, cwd=run.path,
        TRNSLURM_ATTEMPT=str(attempt), TRNSLURM_CHECKPOINTS=str(run.checkpoints),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def lines(run: RunFiles) -> list[dict[str, float]]:
    return read_lines(run.metrics_file)


def stopped_and_resumed(run: RunFiles, script: str) -> Path:
    """Ask it to stop, so that it ends after its first step, and resume it; return where."""
    run.state.mkdir(parents=True)
    write_json(run.stop_file("train", 1), {"cause": "time limit"})
    train(run, script)
    stopped = json.loads(run.stopped_file("train", 1).read_text())
    assert (stopped["step"], stopped["saved"]) == (1, True)
    first = newest_checkpoint(run)
    assert first
    train(run, script, 2, first)
    return first


def weights(run: RunFiles) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint."""
    path = newest_checkpoint(run) or run.path
    if path.is_dir():
        return load_file(path / "model.safetensors")
    return dict(torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("script", ["lightning", "accelerate"])
def test_it_stops_when_asked_and_goes_on_where_it_was(tmp_path: Path, script: str) -> None:
    """In the middle of an epoch; Lightning before its min_epochs, and without validating first."""
    run, undisturbed = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b")
    first = stopped_and_resumed(run, script)
    assert first.name.startswith(("stopped-step-1", "step-1"))
    told = [line for line in lines(run) if line["attempt"] == 1]
    assert [(line["step"], "val_loss" in line) for line in told] == [(1, False)]
    assert newest_step(run) == STEPS
    train(undisturbed, script)
    expected = weights(undisturbed)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())
    last, found = lines(run)[-1], {line["step"]: line for line in lines(undisturbed)}
    assert last["steps"] == STEPS and last["loss"] == found[STEPS]["loss"]
    if script == "lightning":
        assert [*found] == [1, 2, 4, 6, 8, 10, 12]  # log_every_n_steps
        assert {"loss", "train_loss", "val_loss"} <= found[4].keys() and "val_loss" not in found[2]
        assert last["val_loss"] == found[STEPS]["val_loss"]
        # What the module returned, not its share of a step of two micro-batches.
        assert found[4]["loss"] == pytest.approx(found[4]["train_loss"])
        again = [line["step"] for line in lines(run) if line["attempt"] == 2]
        assert min(again) == 2, "step 1 was reported by the attempt that made it"


def test_trainer_stops_when_asked_and_goes_on_where_it_was(tmp_path: Path) -> None:
    run, undisturbed = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b")
    assert stopped_and_resumed(run, "glue") == run.checkpoints / "checkpoint-1"
    assert newest_step(run) == 6
    train(undisturbed, "glue")
    last = [files.checkpoints / "checkpoint-6/model.safetensors" for files in (run, undisturbed)]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert next((line["attempt"], line["step"]) for line in lines(run)) == (1, 1)
    losses = {line["step"]: line["loss"] for line in lines(undisturbed) if "loss" in line}
    assert [*losses] == [2, 4, 6] and lines(undisturbed)[-1]["steps"] == 6
    assert losses[6] == next(line["loss"] for line in lines(run) if line["step"] == 6)


def test_an_adapter_continues_where_it_was(tmp_path: Path) -> None:
    """On Trainer with LoRA: what is saved is the adapter, with its optimizer."""
    pytest.importorskip("peft")
    run, undisturbed = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b")
    stopped_and_resumed(run, "lora")
    train(undisturbed, "lora")
    last = [files.checkpoints / "adapter_model.safetensors" for files in (run, undisturbed)]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert lines(run)[-1]["loss"] == lines(undisturbed)[-1]["loss"]


def test_a_sharded_model_stops_when_asked_and_goes_on_with_other_workers(tmp_path: Path) -> None:
    """Two workers stop in the second epoch; three go on, with the same samples and losses."""
    whole, stopped = RunFiles(tmp_path / "whole"), RunFiles(tmp_path / "stopped")
    for run in (whole, stopped):
        run.state.mkdir(parents=True)

    def start(run: RunFiles, workers: int, attempt: int, *words: str) -> None:
        done = run_workers(
            workers, EXAMPLES / "fsdp/train.py", *words, cwd=run.path,
            TRNSLURM_ATTEMPT=str(attempt), TRNSLURM_CHECKPOINTS=str(run.checkpoints),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    start(whole, 2, 1, "--epochs=2")
    write_json(stopped.stop_file("train", 2), {"cause": "time limit"})
    start(stopped, 2, 1, "--epochs=1")
    start(stopped, 2, 2, "--epochs=2")
    told = json.loads(stopped.stopped_file("train", 2).read_text())
    assert (told["step"], told["saved"]) == (17, True)
    start(stopped, 3, 3, "--epochs=2")
    assert newest_step(stopped) == newest_step(whole) == 32
    order = check_order(RunDir(stopped.path))
    assert (order.ok, order.seen, order.epochs) == (True, 1000, 2)
    assert [each.workers for each in order.stretches] == [2, 2, 3]
    losses = [{line["step"]: line["loss"] for line in lines(run)} for run in (whole, stopped)]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 33))
    for step in range(1, 33):
        bound = 0 if step <= 17 else 1e-5
        assert losses[1][step] == pytest.approx(losses[0][step], rel=bound, abs=0), step


def test_a_script_without_a_word_of_ours_continues_from_its_directory(tmp_path: Path) -> None:
    """With the same losses as without an end in between; and, but for rounding, on one worker."""

    def losses(workers: int, steps: int, out: str) -> dict[str, float]:
        words = (f"--steps={steps}", "--save-every=10", f"--out={tmp_path / out}", "--batch=4")
        done = run_workers(workers, EXAMPLES / "nanogpt/train.py", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        said = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        return {step: float(loss) for _, step, _, loss in said}

    whole = losses(2, 30, "whole")
    assert [*whole] == ["10:", "20:", "30:"] and whole["30:"] < whole["10:"]
    assert losses(2, 10, "out") == {"10:": whole["10:"]}
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    assert losses(2, 30, "out") == {"20:": whole["20:"], "30:": whole["30:"]}
    assert losses(1, 30, "other")["30:"] == pytest.approx(whole["30:"], rel=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning: srun, num_workers
@pytest.mark.parametrize("stop", [7, 9])
def test_lightning_goes_on_with_other_batches_per_step(
    tmp_path: Path, monkeypatch, stop: int
) -> None:
    """As on another number of workers, at the end of an epoch of seven steps and inside one."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from trnslurm.train.lightning import RunCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen: list[tuple[int, int, int]] = []

        def training_step(self, batch, index):
            self.seen.append((loader.step, self.global_step + 1, self.current_epoch))
            return self.layer(batch[0]).square().mean() * batch[1]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    told: list[int] = []
    monkeypatch.setattr(trnslurm, "report", lambda **facts: told.append(facts["step"]))
    resume = None
    for micro, until in ((16, stop), (4, 20)):
        loader = trnslurm.loader(
            torch.utils.data.TensorDataset(torch.ones(103, 2)), global_batch=16, micro_batch=micro,
            scales=True, rank=0, world_size=1,
        )  # fmt: skip
        module = Module()
        lightning.Trainer(
            accelerator="cpu", devices=1, use_distributed_sampler=False, max_steps=until,
            max_epochs=-1, accumulate_grad_batches=loader.accumulation, logger=False,
            callbacks=[RunCallback(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)],
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, loader, ckpt_path=resume)  # fmt: skip
        resume = tmp_path / f"step={until}.ckpt"
        first = 1 if until == stop else stop + 1
        assert module.seen == [
            (step, step, (step - 1) // 7)
            for step in range(first, until + 1)
            for _ in range(loader.accumulation)
        ]
        assert told[-1] == until


def test_lightning_takes_the_number_of_nodes_from_its_variables(monkeypatch) -> None:
    """Those that a job of two nodes sets; with torchrun's, as the launcher does."""
    monkeypatch.setenv("PL_TRAINER_NUM_NODES", "2")
    monkeypatch.setenv("LT_NUM_NODES", "2")
    for name, value in {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    from lightning import Fabric, Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert (trainer.num_nodes, trainer.world_size) == (2, 2)
    assert Trainer(accelerator="cpu", num_nodes=1, logger=False).num_nodes == 1
    assert Fabric(accelerator="cpu").world_size == 2
