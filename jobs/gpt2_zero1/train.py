"""Train GPT-2 with ZeRO-1. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/gpt2_zero1/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.agreement import parameters_agree
from trnslurm.train.batch import Unit, worker_units
from trnslurm.train.data import VOCAB_SIZE, ByteText
from trnslurm.train.device import Device, open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError, run_job
from trnslurm.train.metrics import STEADY_AFTER, Progress
from trnslurm.train.optimizer import GlobalOptimizer, make_optimizer
from trnslurm.train.plan import Plan, check_world, load_plan, read_section
from trnslurm.train.schedule import learning_rate

# One step more than it takes to see every graph, so that a late one shows here and not in training.
PRECOMPILE_STEPS = STEADY_AFTER + 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The recipe's train section."""

    data: str
    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_norm: float
    gradient_checkpointing: bool
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    device: Device
    text: ByteText
    model: GPT2LMHeadModel
    optimizer: GlobalOptimizer


def main() -> None:
    """Train as plan.json says."""
    parser = argparse.ArgumentParser(description="Train GPT-2 with ZeRO-1.")
    parser.add_argument("plan", type=Path, help="plan.json of the run")
    plan = load_plan(parser.parse_args().plan)
    settings = read_section(Settings, plan.train, where="plan.json: train")
    environment = read_environment()

    device = open_device(plan.device, environment)
    check_world(plan, device)

    run = make_training(plan, settings, device)
    precompile = environment.phase == "precompile"
    steps = min(plan.steps, PRECOMPILE_STEPS) if precompile else plan.steps
    progress = Progress(plan, environment, device, steps=steps, log_every=settings.log_every)
    if device.rank == 0:
        print(describe(run, environment), flush=True)

    # Go!
    train(run, progress, steps)

    progress.close()
    agree = parameters_agree(device, run.model)
    if not (agree or precompile):
        raise TrainError("the workers' parameters differ at the end: this training is not valid")
    if device.rank == 0:
        print("precompile done: losses above are invalid" if precompile else "ranks agree")
    device.close()


def train(run: Training, progress: Progress, steps: int) -> None:
    """Run the steps. Each call of device.sync() ends one graph: a unit's, or the optimizer's."""
    plan, settings, device = run.plan, run.settings, run.device
    loss_sum = device.put(torch.zeros(1))
    run.model.train()
    for step in range(steps):
        for unit in worker_units(plan, worker=device.rank, step=step):
            loss = unit_loss(run, unit)
            loss.backward()
            loss_sum += loss.detach()
            device.sync()

        lr = learning_rate(
            settings.schedule,
            peak=settings.lr,
            warmup_steps=settings.warmup_steps,
            step=step,
            steps=plan.steps,
        )
        grad_norm = run.optimizer.step(lr)
        step_loss = loss_sum.clone()
        loss_sum.zero_()
        run.optimizer.zero_grad()
        device.sync()

        if progress.due(step + 1):
            [global_loss] = device.total(step_loss.tolist())
            progress.report(step + 1, loss=global_loss, grad_norm=grad_norm.item(), lr=lr)


def unit_loss(run: Training, unit: Unit) -> Tensor:
    """Give a unit's share of the global batch's mean loss."""
    device = run.device
    # Packed text has no padding, so every sample predicts all its tokens but the first.
    valid_tokens = run.plan.batch.global_batch * (run.plan.seq_len - 1)
    tokens = device.put(run.text.samples(unit.first, unit.size))
    # A vector, because torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    weight = device.put(torch.tensor([unit.weight / valid_tokens]))
    device.seed(unit.seed)
    with device.autocast(run.plan.precision):
        logits = run.model(tokens, use_cache=False).logits
    targets = tokens[:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum") * weight


def make_training(plan: Plan, settings: Settings, device: Device) -> Training:
    """Make what the loop works with, on the device."""
    text = open_text(plan, settings)
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings.optimizer,
        device,
        model.parameters(),
        weight_decay=settings.weight_decay,
        max_norm=settings.max_norm,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    device.sync()
    return Training(
        plan=plan, settings=settings, device=device, text=text, model=model, optimizer=optimizer
    )


def open_text(plan: Plan, settings: Settings) -> ByteText:
    """Open the text to train on: the job's own unless the recipe names a file."""
    path = Path(settings.data) if settings.data else Path(__file__).with_name("text.txt")
    if plan.model["vocab_size"] < VOCAB_SIZE:
        raise TrainError(
            f"model.vocab_size is {plan.model['vocab_size']}: byte tokens need {VOCAB_SIZE}"
        )
    if plan.model["n_positions"] < plan.seq_len:
        raise TrainError(
            f"seq_len is {plan.seq_len}, but model.n_positions only {plan.model['n_positions']}"
        )
    return ByteText(path, seq_len=plan.seq_len, seed=plan.seed)


def make_model(plan: Plan, settings: Settings, device: Device) -> GPT2LMHeadModel:
    """Make a new GPT-2; the seed makes it the same on every worker."""
    torch.manual_seed(plan.seed)
    config = GPT2Config(**plan.model, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    model.to(
        device=device.torch_device,
        dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float32,
    )
    # Moving to an XLA device makes new parameters and so unties the output layer.
    model.tie_weights()
    if settings.gradient_checkpointing:
        # Not gradient_checkpointing_enable(): it takes PyTorch's function, which fails on XLA.
        model._set_gradient_checkpointing(gradient_checkpointing_func=device.checkpoint)
    return model


def describe(run: Training, environment: Environment) -> str:
    """Say in one block what is about to run."""
    plan, batch = run.plan, run.plan.batch
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    tokens = batch.global_batch * plan.seq_len
    return f"""\
{plan.recipe} ({plan.preset}): {environment.phase}, attempt {environment.attempt}
  device  {plan.device}, W {plan.workers} ({plan.nodes} nodes x {plan.workers_per_node} workers)
  batch   G {batch.global_batch}, m {batch.micro_batch}, A {batch.accumulation}, \
{batch.units} units and {batch.padding_units} of padding
  model   {parameters:,} parameters, {plan.precision}, {run.settings.optimizer}
  data    {len(run.text.blocks):,} blocks of {plan.seq_len} byte tokens
  steps   {plan.steps:,} of {tokens:,} tokens each"""


if __name__ == "__main__":
    run_job(main)
