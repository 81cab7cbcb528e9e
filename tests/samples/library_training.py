"""library_training.py LIBRARY OUT START DIES: a training with trnslurm.loader, by a library.

Every worker writes what it computes in each step into OUT. START is the number of this start, which
goes on from the newest checkpoint. In step DIES one of the workers is killed; 0: none is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_USE_CPU": "true", "USE_TORCH_XLA": "0"}

import torch
from torch.utils.data import Dataset

import trnslurm

SAMPLES, EPOCHS = 29, 4
OPTIONS: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 5, "scales": True}
STEPS = EPOCHS * -(-SAMPLES // 8)
SAVE_EVERY = 3
RANK, WORKERS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Points(Dataset):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(SAMPLES, 8, generator=numbers), torch.arange(SAMPLES) % 3.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": torch.tensor(index), "x": self.x[index], "y": self.y[index]}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": ((self.layers(x)[:, 0] - y) ** 2).mean()}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Training:
    """What is written of it, and when it is killed."""

    def __init__(self, out: Path, start: int, dies: int) -> None:
        self.out, self._dies = out, dies
        self._log = (out / f"log-{start}-{RANK}").open("w")

    def computed(self, step: int, ids: Any, scale: Any, loss: Any) -> None:
        """Note a micro-batch; one that counts nothing is a padding."""
        line = {"step": step, "ids": ids.tolist() if scale else [], "loss": float(loss)}
        print(json.dumps(line), file=self._log, flush=True)

    def ended(self, step: int) -> None:
        if step == self._dies and step % WORKERS == RANK:
            os.kill(os.getpid(), signal.SIGKILL)

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        saved = [p for p in self.out.glob("step-*") if p.is_file() or (p / "whole").exists()]
        return max(saved, key=lambda path: int(path.name[5:].partition(".")[0]), default=None)


def by_accelerate(training: Training) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net, optimizer_of(net), trnslurm.loader(Points(), num_workers=1, **OPTIONS)
    )
    if saved := training.newest():
        accelerator.load_state(saved)
    accelerator.wait_for_everyone()
    while loader.epoch < EPOCHS:
        for batch in loader:
            last = loader.ends_step
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = model(batch["x"], batch["y"])["loss"] * batch["scale"] / loader.accumulation
                accelerator.backward(loss)
            training.computed(loader.step, batch["id"], batch["scale"], loss / WORKERS)
            if not last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            training.ended(loader.step)
            if loader.step % SAVE_EVERY == 0:
                place = training.out / f"step-{loader.step}"
                accelerator.save_state(place)
                accelerator.wait_for_everyone()
                (place / "whole").touch()
    accelerator.end_training()


def by_lightning(training: Training) -> None:
    import lightning.pytorch as pl

    loader = trnslurm.loader(Points(), **OPTIONS)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = Net(), 0

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch["x"], batch["y"])["loss"] * batch["scale"]
            part = loss / WORKERS / loader.accumulation
            training.computed(self.global_step + 1, batch["id"], batch["scale"], part)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step != self.seen:
                self.seen = self.global_step
                training.ended(self.seen)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    saves = pl.callbacks.ModelCheckpoint(
        training.out, "step-{step}", every_n_train_steps=SAVE_EVERY, save_top_k=-1,
        auto_insert_metric_name=False,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=WORKERS, strategy="ddp", max_epochs=-1, max_steps=STEPS,
        use_distributed_sampler=False, accumulate_grad_batches=loader.accumulation, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saves],
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=training.newest())


if __name__ == "__main__":
    torch.set_num_threads(1)
    train = {"accelerate": by_accelerate, "lightning": by_lightning}
    train[sys.argv[1]](Training(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
