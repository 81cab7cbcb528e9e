"""A custom script on DistributedDataParallel that goes on until it is asked to stop.

    python -m torch.distributed.run --nproc_per_node 3 ddp_worker.py '{"slow": "computing"}'

Worker 1 is slow in what `slow` says: computing, data, saving, or nothing. `loop` is who trains.
With `meets` the workers also meet inside of the forward pass, as for a contrastive loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trnslurm
from trnslurm import ddp_pace, pace

OPTIONS = {"slow": "", "loop": "own", "meets": False, "pause_s": 0.01, "least": 10}
OPTIONS |= json.loads(sys.argv[1])
RANK = int(os.environ["RANK"])
LATE_S = 0.04

torch.set_num_threads(1)
ddp_pace._BEGIN_S, ddp_pace._READ_S, ddp_pace.LOOK_S = 0.0, 0.0, 0.3
pace._LEAST_STEPS = OPTIONS["least"]
make = DistributedDataParallel.__init__


def make_and_time_all(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
    """Let it time every step: a hundred take a test too long."""
    make(model, *args, **options)
    model._set_ddp_runtime_logging_sample_rate(1)


DistributedDataParallel.__init__ = make_and_time_all


def late(what: str) -> None:
    if RANK == 1 and OPTIONS["slow"] == what:
        time.sleep(LATE_S)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        late("data")
        return {"rows": torch.ones(8) * (index % 7), "labels": torch.zeros(8)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        time.sleep(OPTIONS["pause_s"])
        late("computing")
        out = self.layers(rows)
        if OPTIONS["meets"]:
            dist.all_reduce(torch.ones(1))
        return {"loss": out.square().mean()}


def own_loop() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, batch in enumerate(DataLoader(Rows(), batch_size=2), 1):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        late("saving")
        trnslurm.report(step=step)
        if trnslurm.should_stop():
            break
    dist.destroy_process_group()


def on_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    from trnslurm.train.trainer import RunCallback

    arguments = TrainingArguments(
        "out", max_steps=100_000, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[RunCallback()]).train()


def on_lightning() -> None:
    import lightning as L  # noqa: N812

    from trnslurm.train.lightning import RunCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=100_000, logger=False, callbacks=[RunCallback()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Rows(), batch_size=2))


{"own": own_loop, "trainer": on_trainer, "lightning": on_lightning}[OPTIONS["loop"]]()
print("ended as asked", flush=True)
