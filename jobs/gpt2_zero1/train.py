"""Train GPT-2 with ZeRO-1. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/gpt2_zero1/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit, eval_units, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.agreement import conclude
from trnslurm.train.loop.job import check_world, run_job
from trnslurm.train.loop.progress import Progress, flops_per_sample
from trnslurm.train.loop.schedule import SaveTimes, due, learning_rate, steps_to_run, total_steps
from trnslurm.train.loop.supervision import Supervision
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.optimizer import GlobalOptimizer
from trnslurm.train.plan import Plan, describe_plan, parse_plan, read_settings
from trnslurm.train.say import say
from trnslurm.train.settings import CommonSettings


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    gradient_checkpointing: bool


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    steps: int
    """Of the whole training, however many runs it takes: the schedule ends there."""
    device: Device
    text: Text
    held_out: Text
    model: GPT2LMHeadModel
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Train GPT-2 with ZeRO-1.")
    settings = read_settings(Settings, plan, not_zero=("log_every", "eval_samples"))
    environment = read_environment()
    device = open_device(plan.device, environment)
    check_world(plan, device)

    run = make_training(plan, settings, device, environment)
    if device.rank == 0:
        say(describe(run, environment))
    supervision = run_training(run, environment)
    device.close()
    supervision.note_stop()


def run_training(run: Training, environment: Environment) -> Supervision:
    """Train to the end, or as far as this run shall go."""
    plan, device = run.plan, run.device
    done = run.checkpoints.resume(run.optimizer)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    flops = flops_per_sample(run.model, run.model.config, plan.seq_len)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        plan,
        environment,
        device,
        steps=steps,
        log_every=run.settings.log_every,
        flops_per_sample=flops,
        ask=saves.overdue,
    )

    # Go!
    with Supervision(run.plan, run.settings, device, environment, progress) as supervision:
        train(run, progress, saves, supervision)

    run.checkpoints.require_last()
    progress.close()
    if not supervision.stopped:  # or every second may count
        conclude(device, run.model, environment)
    return supervision


def train(run: Training, progress: Progress, saves: SaveTimes, supervision: Supervision) -> None:
    """Run the steps. Each call of device.sync() ends one graph: a unit's, or the optimizer's."""
    plan, settings, device, steps = run.plan, run.settings, run.device, progress.steps
    valid_tokens = plan.batch.global_batch * predicted_tokens(plan)
    loss_sum = device.put(torch.zeros(1))
    run.model.train()
    for step in steps:
        for unit in worker_units(plan, worker=device.rank, step=step):
            loss = unit_loss(run, run.text, unit, valid_tokens)
            loss.backward()
            loss_sum += loss.detach()
            device.sync()

        lr = learning_rate(settings, step=step, steps=run.steps)
        grad_norm = run.optimizer.step(lr)
        step_loss = loss_sum.clone()
        loss_sum.zero_()
        run.optimizer.zero_grad()
        device.sync()

        done = step + 1
        evaluated = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        if due(settings.eval_every, done, also=(steps.start + 1, steps.stop)):
            evaluated = evaluate(run)
        overdue = progress.note(done, loss=step_loss, grad_norm=grad_norm, lr=lr, **evaluated)
        stops = supervision.step_done(done)
        if saves.due(done, overdue=overdue or stops):
            progress.report()
            samples = done * plan.batch.global_batch
            run.checkpoints.save(step=done, samples=samples, optimizer=run.optimizer)
        run.checkpoints.poll()
        if stops:
            break


@torch.no_grad()
def evaluate(run: Training) -> dict[str, float]:
    """Give the mean loss on the first samples of the held-out text, whatever the worker count."""
    plan, device = run.plan, run.device
    units = eval_units(plan, worker=device.rank, samples=run.settings.eval_samples)
    valid_tokens = run.settings.eval_samples * predicted_tokens(plan)
    loss_sum = device.put(torch.zeros(1))
    run.model.eval()
    with device.timer("eval"):
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
    with device.timer("data"):
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
    text = open_split(plan, "train")
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
    checkpoints = open_checkpoints(plan, settings, device, environment, data=text.fingerprint)
    return Training(
        plan=plan,
        settings=settings,
        steps=total_steps(plan, epochs=settings.epochs, samples_per_epoch=text.num_blocks),
        device=device,
        text=text,
        held_out=open_split(plan, "eval") if settings.eval_every else text,
        model=model,
        optimizer=optimizer,
        checkpoints=checkpoints,
    )


def open_split(plan: Plan, split: str) -> Text:
    """Open a split of the text to train on: the job's own unless the plan names one."""
    path = Path(plan.data).expanduser() if plan.data else Path(__file__).with_name("text.txt")
    text = open_text(path, split=split, seq_len=plan.seq_len, seed=plan.seed)
    vocabulary, positions = plan.model["vocab_size"], plan.model["n_positions"]
    if vocabulary < text.vocab_size:
        raise TrainError(f"model.vocab_size is {vocabulary}: {path} needs {text.vocab_size}")
    if positions < plan.seq_len:
        raise TrainError(f"seq_len is {plan.seq_len}, but model.n_positions only {positions}")
    return text


def make_model(plan: Plan, settings: Settings, device: Device) -> GPT2LMHeadModel:
    """Make a GPT-2: a new one, of which the seed makes the same on every worker, or a saved one."""
    config = GPT2Config(**plan.model)
    config._attn_implementation = choose_attention(config, device)
    torch.manual_seed(plan.seed)
    model = GPT2LMHeadModel(config)
    if settings.init_from:
        load_parameters(model, settings.init_from)
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
    # GPT-2 masks what comes later by itself. transformers would still make a mask in every call, to
    # keep packed samples apart that are not there, and add it to all scores.
    for attention in ("eager", "sdpa"):
        AttentionMaskInterface.register(attention, lambda **_: None)
    special = config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn
    fused = device.torch_device.type != "xla" and config.scale_attn_weights and not special
    return "sdpa" if fused else "eager"


def describe(run: Training, environment: Environment) -> str:
    """Say in one block what is about to run."""
    plan, settings, text = run.plan, run.settings, run.text
    size = sum(parameter.numel() for parameter in run.model.parameters())
    tokens = plan.batch.global_batch * plan.seq_len
    return f"""\
{describe_plan(plan, environment)}
  model   {size:,} parameters, {settings.init_from or "new"}, {plan.precision}, {settings.optimizer}
  data    {text.num_tokens:,} tokens in {text.num_blocks:,} blocks of {plan.seq_len}
  steps   {run.steps:,} of {tokens:,} tokens each"""


if __name__ == "__main__":
    run_job(main)
