"""One training on five libraries, as docs/loader.md says; it writes down what it computes.

    train.py LIBRARY --records DIRECTORY --out DIRECTORY [--resume CHECKPOINT] [--until STEP]

Each worker appends a line per micro-batch: step, samples, scale, loss, and a checksum of weights.
DistributedDataParallel would rearrange its buckets after the first step of an attempt, and then add
in another order: find_unused_parameters prevents that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from zlib import crc32

parser = argparse.ArgumentParser()
LIBRARIES = ["torch", "mix", "accelerate", "lightning", "trainer", "torchtitan"]
parser.add_argument("library", choices=LIBRARIES)
parser.add_argument("--records", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume")
parser.add_argument("--until", type=int)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()

ATTEMPT = int(os.environ.get("TRNSLURM_ATTEMPT", "1"))
RANK = int(os.environ.get("RANK", "0"))
options.records.mkdir(parents=True, exist_ok=True)
FILE = (options.records / f"{ATTEMPT}-{RANK}").open("a", buffering=1)
# Before the libraries are imported, so that a worker can be killed while it starts.
print(json.dumps({"pid": os.getpid(), "world": int(os.environ.get("WORLD_SIZE", "1"))}), file=FILE)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import trnslurm  # noqa: E402

SAMPLES, SAVE_EVERY, STEPS = 103, 5, 210
BATCH = {"global_batch": 16, "micro_batch": 4, "seed": 7}
UNTIL = options.until or STEPS
SOURCES = {"web": (103, 0.6), "code": (31, 0.3), "math": (9, 0.1)}
SCHEDULE = [(60, {"web": 0.2, "code": 0.5, "math": 0.3}), (150, {"code": 1, "math": 2})]


class Samples(torch.utils.data.Dataset):
    """Random numbers, each with the number of the sample."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(first))
        self.first = first

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict:
        return {
            "id": self.first + index, "x": self.x[index], "labels": self.x[index].sin().sum()
        }  # fmt: skip


class Texts(Samples):
    """Random tokens."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        self.tokens = torch.randint(64, (SAMPLES, 16), generator=torch.Generator().manual_seed(2))

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "tokens": self.tokens[index]}


class Model(nn.Module):
    """It takes what models of transformers take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels, **kwargs) -> dict:
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(1), labels)}


MODEL = Model()


def sgd(parameters) -> torch.optim.Optimizer:
    """A wrong scale of the gradients shows, as it would not with Adam."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def record(step: int, ids: torch.Tensor, scale: float, loss: torch.Tensor) -> None:
    weights = torch.cat([local(each.detach()).flatten() for each in MODEL.parameters()])
    line = {
        "step": step, "ids": ids.tolist(), "scale": scale, "loss": loss.item(),
        "weights": crc32(weights.numpy().tobytes()),
    }  # fmt: skip
    print(json.dumps(line), file=FILE)
    time.sleep(options.pause)


def on_torch() -> None:
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(MODEL, find_unused_parameters=True)
    optimizer = sgd(MODEL.parameters())
    data, state = Samples(SAMPLES), {"model": MODEL, "optimizer": optimizer}
    done = trnslurm.load(state, directory=options.out)
    steps = trnslurm.batches(SAMPLES, **BATCH, steps=UNTIL, start=done)
    for step in steps:
        for micro in step.micro_batches:
            batch = torch.utils.data.default_collate([data[i] for i in micro.indices])
            loss = wrapped(**batch)["loss"]
            record(step.number, batch["id"], micro.scale, loss)
            if micro.last:
                (loss * micro.weight * steps.world_size).backward()
            else:
                with wrapped.no_sync():
                    (loss * micro.weight * steps.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        trnslurm.report(step=step.number, steps=STEPS)
        if step.number % SAVE_EVERY == 0:
            trnslurm.save(step.number, state, directory=options.out)
    dist.destroy_process_group()


def on_mix() -> None:
    """The same by the loader, with processes that read, from three sources."""
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(MODEL, find_unused_parameters=True)
    optimizer = sgd(MODEL.parameters())
    mix = trnslurm.mix(SOURCES, global_batch=16, seed=7, schedule=SCHEDULE)
    data = {name: Samples(n, 1000 * k) for k, (name, (n, _)) in enumerate(SOURCES.items())}
    loader = trnslurm.loader(
        data, mix=mix, steps_per_epoch=20, micro_batch=4, scales=True, num_workers=1
    )
    state = {"model": MODEL, "optimizer": optimizer, "loader": loader}
    trnslurm.load(state, directory=options.out)
    while loader.state_dict()["step"] < UNTIL:
        for batch in loader:
            scale = batch.pop("scale")
            loss = wrapped(**batch)["loss"]
            record(loader.step, batch["id"], scale, loss)
            (loss * scale / loader.accumulation).backward()
            if not loader.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            trnslurm.report(step=loader.step, steps=STEPS)
            if loader.step % SAVE_EVERY == 0:
                trnslurm.save(loader.step, state, directory=options.out)
            if loader.step == UNTIL:
                break
    dist.destroy_process_group()


def on_accelerate() -> None:
    import contextlib

    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    loader = trnslurm.loader(Samples(SAMPLES), **BATCH, scales=True)
    model, optimizer, loader = accelerator.prepare(MODEL, sgd(MODEL.parameters()), loader)
    if options.resume:
        accelerator.load_state(options.resume)
    while loader.state_dict()["step"] < UNTIL:
        for batch in loader:
            scale = batch.pop("scale")
            ends = loader.ends_step
            with contextlib.nullcontext() if ends else accelerator.no_sync(model):
                loss = model(**batch)["loss"]
                record(loader.step, batch["id"], scale, loss)
                accelerator.backward(loss * scale / loader.accumulation)
            if not ends:
                continue
            optimizer.step()
            optimizer.zero_grad()
            trnslurm.report(step=loader.step, steps=STEPS)
            if loader.step % SAVE_EVERY == 0:
                path = options.out / f"step-{loader.step}"
                accelerator.save_state(path)
                trnslurm.saved(loader.step, path)
            if loader.step == UNTIL:
                break
    accelerator.end_training()


def on_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from trnslurm.train.lightning import RunCallback

    loader = trnslurm.loader(Samples(SAMPLES), **BATCH, scales=True)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MODEL

        def training_step(self, batch, index):
            scale = batch.pop("scale")
            loss = self.model(**batch)["loss"]
            record(loader.step, batch["id"], scale, loss)
            return loss * scale

        def configure_optimizers(self):
            return sgd(self.parameters())

    saves = ModelCheckpoint(dirpath=options.out, every_n_train_steps=SAVE_EVERY, save_top_k=2,
                            monitor="step", mode="max")  # fmt: skip
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu", num_nodes=world // local, devices=local,
        strategy="ddp_find_unused_parameters_true", use_distributed_sampler=False,
        accumulate_grad_batches=loader.accumulation, max_steps=UNTIL, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[RunCallback(), saves],
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=options.resume)


def on_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    from trnslurm.train.trainer import RunCallback

    arguments = TrainingArguments(
        output_dir=str(options.out), use_cpu=True, max_steps=UNTIL, max_grad_norm=0.0,
        ddp_find_unused_parameters=True, save_steps=SAVE_EVERY, save_total_limit=2,
        report_to="none", disable_tqdm=True, remove_unused_columns=False, logging_steps=10,
    )  # fmt: skip
    loader = trnslurm.loader(Samples(SAMPLES), **BATCH, scales=True)
    arguments.gradient_accumulation_steps = loader.accumulation

    class MyTrainer(Trainer):
        def get_train_dataloader(self):
            return loader

        def compute_loss(self, model, inputs, num_items_in_batch=None, return_outputs=False):
            scale = inputs.pop("scale")
            loss = model(**inputs)["loss"]
            record(self.state.global_step + 1, inputs["id"], scale, loss)
            return loss * scale

    optimizer = sgd(MODEL.parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = MyTrainer(
        MODEL, arguments, callbacks=[RunCallback()], optimizers=(optimizer, constant)
    )
    trainer.model_accepts_loss_kwargs = False
    trainer.train(resume_from_checkpoint=options.resume)


def on_torchtitan() -> None:
    """Its own Trainer, Llama, FSDP2 and checkpoints, which need a few changes to run on CPUs."""
    global MODEL
    from types import SimpleNamespace

    from torch.distributed.tensor import distribute_tensor

    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import loss, metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
    from torchtitan.train import Trainer

    memory = dict.fromkeys(metrics.DeviceMemStats._fields, 0)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="A100", get_peak_stats=lambda: metrics.DeviceMemStats(**memory),
        reset_peak_stats=lambda: None,
    )  # fmt: skip
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)

    class Data(BaseDataLoader):
        def __init__(self, dp_rank, dp_world_size, job_config, **others) -> None:
            self.loader = trnslurm.loader(
                Texts(), **BATCH, scales=True, rank=dp_rank, world_size=dp_world_size
            )
            workers_batch = job_config.training.local_batch_size * dp_world_size
            job_config.training.global_batch_size = self.loader.accumulation * workers_batch

        def __iter__(self):
            while True:
                for batch in self.loader:
                    self.batch, tokens = batch, batch["tokens"]
                    yield {"input": tokens}, tokens.roll(-1, 1)

        def state_dict(self):
            return self.loader.state_dict()

        def load_state_dict(self, state):
            self.loader.load_state_dict(state)

    def scaled(predicted, labels):
        data = trainer.dataloader
        value = loss.cross_entropy_loss(predicted, labels)
        record(data.loader.step, data.batch["id"], data.batch["scale"], value)
        return value * data.batch["scale"]

    class MyTrainer(Trainer):
        def train_step(self, batches):
            super().train_step(batches)
            trnslurm.report(step=self.step, steps=STEPS)

        def should_continue_training(self):
            return self.step < UNTIL

    small = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=32)
    register_train_spec("small", TrainSpec(
        model_cls=Transformer, model_args={"small": small}, parallelize_fn=parallelize_llama,
        pipelining_fn=None, build_lr_schedulers_fn=build_lr_schedulers, build_tokenizer_fn=None,
        build_optimizers_fn=lambda models, *rest: OptimizersContainer(
            models, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
        build_dataloader_fn=Data, build_loss_fn=lambda *args, **others: scaled,
    ))  # fmt: skip
    trainer = MyTrainer(ConfigManager().parse_args([
        "--model.name=small", "--model.flavor=small", f"--job.dump_folder={options.out}",
        f"--training.steps={STEPS}", "--training.seq_len=16", "--training.max_norm=1e9",
        "--training.local_batch_size=4", "--training.mixed_precision_param=float32",
        "--training.seed=1", "--checkpoint.enable", f"--checkpoint.interval={SAVE_EVERY}",
        "--checkpoint.folder=.", "--checkpoint.keep_latest_k=2",
        "--checkpoint.no-last-save-model-only", "--lr_scheduler.warmup_steps=2",
        "--activation_checkpoint.mode=none", "--comm.trace_buf_size=0",
    ]))  # fmt: skip
    MODEL = trainer.model_parts[0]
    draw = torch.Generator().manual_seed(1)  # its own depend on the number of workers
    for weight in MODEL.parameters():
        whole = torch.randn(weight.shape, generator=draw) / 8
        if hasattr(weight, "to_local"):
            whole = distribute_tensor(whole, weight.device_mesh, weight.placements)
        weight.data.copy_(whole)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


getattr(sys.modules[__name__], f"on_{options.library}")()
