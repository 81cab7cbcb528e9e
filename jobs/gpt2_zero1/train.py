"""Train GPT-2 with ZeRO-1. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/gpt2_zero1/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from trnslurm.train.agreement import parameters_agree
from trnslurm.train.batch import Unit, eval_units, worker_units
from trnslurm.train.checkpoint import Checkpoints
from trnslurm.train.data import Text, open_text
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
    eval_every: int
    eval_samples: int
    save_every: int
    keep_last: int
    keep_every: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    device: Device
    text: Text
    held_out: Text
    model: GPT2LMHeadModel
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="Train GPT-2 with ZeRO-1.")
    parser.add_argument("plan", type=Path, help="plan.json of the run")
    plan = load_plan(parser.parse_args().plan)
    settings = read_section(Settings, plan.train, where="plan.json: train")
    environment = read_environment()

    device = open_device(plan.device, environment)
    check_world(plan, device)

    run = make_training(plan, settings, device, environment)
    precompile = environment.phase == "precompile"
    steps = min(plan.steps, PRECOMPILE_STEPS) if precompile else plan.steps
    if device.rank == 0:
        print(describe(run, environment), flush=True)
    first_step = 0
    if saved := run.checkpoints.newest():
        run.checkpoints.load(saved, run.optimizer)
        first_step = saved.step
    progress = Progress(
        plan, environment, device, steps=steps, first_step=first_step,
        log_every=settings.log_every, flops_per_sample=flops_per_sample(run.model, plan.seq_len),
    )  # fmt: skip

    # Go!
    train(run, progress, range(first_step, steps))

    run.checkpoints.close()
    progress.close()
    agree = parameters_agree(device, run.model)
    if not (agree or precompile):
        raise TrainError("the workers' parameters differ at the end: this training is not valid")
    if device.rank == 0:
        print("precompile done: losses above are invalid" if precompile else "ranks agree")
    device.close()


def train(run: Training, progress: Progress, steps: range) -> None:
    """Run the steps. Each call of device.sync() ends one graph: a unit's, or the optimizer's."""
    plan, settings, device = run.plan, run.settings, run.device
    valid_tokens = plan.batch.global_batch * predicted_tokens(plan)
    loss_sum = device.put(torch.zeros(1))
    run.model.train()
    for step in steps:
        for unit in worker_units(plan, worker=device.rank, step=step):
            loss = unit_loss(run, run.text, unit, valid_tokens)
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

        done = step + 1
        evaluated = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        if due(settings.eval_every, done, also=(steps[0] + 1, steps[-1] + 1)):
            evaluated = evaluate(run)
        progress.note(done, loss=step_loss, grad_norm=grad_norm, lr=lr, **evaluated)
        if due(settings.save_every, done, also=(steps[-1] + 1,)):
            samples = done * plan.batch.global_batch
            run.checkpoints.save(step=done, samples=samples, optimizer=run.optimizer)
        run.checkpoints.poll()


def due(every: int, step: int, also: tuple[int, ...]) -> bool:
    """Tell whether what happens every so many steps (0: never), and also at some, is due."""
    return every > 0 and (step % every == 0 or step in also)


@torch.no_grad()
def evaluate(run: Training) -> dict[str, float]:
    """Give the mean loss on the first samples of the held-out text, whatever the worker count."""
    plan, device = run.plan, run.device
    units = eval_units(plan, worker=device.rank, samples=run.settings.eval_samples)
    valid_tokens = run.settings.eval_samples * predicted_tokens(plan)
    loss_sum = device.put(torch.zeros(1))
    run.model.eval()
    with device.clock("eval"):
        for unit in units:
            loss_sum += unit_loss(run, run.held_out, unit, valid_tokens)
            device.sync()
        [loss] = device.total(loss_sum.tolist())
    run.model.train()
    return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def predicted_tokens(plan: Plan) -> int:
    """Count the tokens of a sample that are predicted: packed text has no padding, but a first."""
    return plan.seq_len - 1


def unit_loss(run: Training, text: Text, unit: Unit, valid_tokens: int) -> Tensor:
    """Give a unit's share of the mean loss over so many tokens."""
    device = run.device
    with device.clock("data"):
        tokens = device.put(text.samples(unit.first, unit.size))
    # A vector, because torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    weight = device.put(torch.tensor([unit.weight / valid_tokens]))
    device.seed(unit.seed)
    with device.autocast(run.plan.precision):
        logits = run.model(tokens, use_cache=False).logits
    targets = tokens[:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum") * weight


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the loop works with, on the device."""
    text = open_split(plan, settings, "train")
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings.optimizer,
        device,
        model.named_parameters(),
        weight_decay=settings.weight_decay,
        max_norm=settings.max_norm,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    device.sync()
    checkpoints = Checkpoints(
        environment.run_dir / "checkpoints",
        device,
        plan,
        environment,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        facts={"data": text.fingerprint},
    )
    return Training(
        plan=plan,
        settings=settings,
        device=device,
        text=text,
        held_out=open_split(plan, settings, "eval") if settings.eval_every else text,
        model=model,
        optimizer=optimizer,
        checkpoints=checkpoints,
    )


def open_split(plan: Plan, settings: Settings, split: str) -> Text:
    """Open a split of the text to train on: the job's own unless the recipe names one."""
    path = Path(settings.data) if settings.data else Path(__file__).with_name("text.txt")
    text = open_text(path, split=split, seq_len=plan.seq_len, seed=plan.seed)
    if plan.model["vocab_size"] < text.vocab_size:
        raise TrainError(
            f"model.vocab_size is {plan.model['vocab_size']}: {path} needs {text.vocab_size}"
        )
    if plan.model["n_positions"] < plan.seq_len:
        raise TrainError(
            f"seq_len is {plan.seq_len}, but model.n_positions only {plan.model['n_positions']}"
        )
    return text


def make_model(plan: Plan, settings: Settings, device: Device) -> GPT2LMHeadModel:
    """Make a new GPT-2; the seed makes it the same on every worker."""
    # GPT-2 masks what comes later by itself. transformers would still make a mask in every call, to
    # keep packed samples apart that are not there, and add it to all scores.
    for attention in ("eager", "sdpa"):
        AttentionMaskInterface.register(attention, lambda **_: None)
    torch.manual_seed(plan.seed)
    config = GPT2Config(**plan.model)
    config._attn_implementation = choose_attention(config, device)
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


def choose_attention(config: GPT2Config, device: Device) -> str:
    """Take PyTorch's fused attention where there is one that does what the config asks for."""
    special = config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn
    fused = device.torch_device.type != "xla" and config.scale_attn_weights and not special
    return "sdpa" if fused else "eager"


def flops_per_sample(model: GPT2LMHeadModel, seq_len: int) -> float:
    """Count what training on a sample takes: 6 per parameter and token, and the attention."""
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return seq_len * (6.0 * parameters + 12.0 * config.n_layer * config.n_embd * seq_len)


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
  data    {run.text.num_tokens:,} tokens in {run.text.num_blocks:,} blocks of {plan.seq_len}
  steps   {plan.steps:,} of {tokens:,} tokens each"""


if __name__ == "__main__":
    run_job(main)
