"""Pretrain BERT. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_pretrain/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.shards import Samples, ShardedSamples, open_shards
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

PARTS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy")
"""The loss, and what it consists of: of masked tokens (MLM) and next sentences (NSP)."""

RATES = {"seq/s": "samples_per_s", "tokens/s": "tokens_per_s"}
"""What the console shows of the speed; seq/s is the tutorial's."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    max_pred: int
    zero1: bool
    optimizer_precision: str
    expected_samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    steps: int
    """Of the whole training, however many runs it takes: the schedule ends there."""
    device: Device
    text: ShardedSamples
    held_out: ShardedSamples
    model: BertForPreTraining
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Pretrain BERT.")
    settings = read_settings(Settings, plan, not_zero=("log_every", "eval_samples", "max_pred"))
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
    done = run.checkpoints.resume(run.optimizer)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        run.plan,
        environment,
        run.device,
        steps=steps,
        log_every=run.settings.log_every,
        flops_per_sample=sample_flops(run),
        parts=PARTS,
        rates=RATES,
        ask=saves.overdue,
        expected_samples_per_s=run.settings.expected_samples_per_s,
    )

    # Go!
    with Supervision(run.plan, run.settings, run.device, environment, progress) as supervision:
        train(run, progress, saves, supervision)

    run.checkpoints.require_last()
    progress.close()
    if not supervision.stopped:  # or every second may count
        conclude(run.device, run.model, environment)
    return supervision


def train(run: Training, progress: Progress, saves: SaveTimes, supervision: Supervision) -> None:
    """Run the steps. Each call of device.sync() ends one graph: a unit's, or the optimizer's."""
    plan, settings, device, steps = run.plan, run.settings, run.device, progress.steps
    samples = plan.batch.global_batch
    sums = device.put(torch.zeros(len(PARTS)))
    run.model.train()
    for step in steps:
        masked_tokens = run.text.masked_tokens(step * samples, samples)
        for unit in worker_units(plan, worker=device.rank, step=step):
            numbers = unit_loss(run, run.text, unit, (masked_tokens, samples))
            numbers[0].backward()
            sums += numbers.detach()
            device.sync()

        lr = learning_rate(settings, step=step, steps=run.steps)
        grad_norm = run.optimizer.step(lr)
        step_sums = sums.clone()
        sums.zero_()
        run.optimizer.zero_grad()
        device.sync()

        done = step + 1
        evaluated = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        if due(settings.eval_every, done, also=(steps.start + 1, steps.stop)):
            evaluated = evaluate(run)
        overdue = progress.note(done, loss=step_sums, grad_norm=grad_norm, lr=lr, **evaluated)
        stops = supervision.step_done(done)
        if saves.due(done, overdue=overdue or stops):
            progress.report()
            run.checkpoints.save(step=done, samples=done * samples, optimizer=run.optimizer)
        run.checkpoints.poll()
        if stops:
            break


@torch.no_grad()
def evaluate(run: Training) -> dict[str, float]:
    """Give the losses on the first samples of the held-out shards, whatever the worker count."""
    plan, device = run.plan, run.device
    wanted = min(run.settings.eval_samples, run.held_out.num_samples)
    units = eval_units(plan, worker=device.rank, samples=wanted)
    # All of the last unit, which may reach beyond them.
    samples = -(-wanted // plan.batch.micro_batch) * plan.batch.micro_batch
    counts = (run.held_out.masked_tokens(0, samples), samples)
    sums = device.put(torch.zeros(len(PARTS)))
    run.model.eval()
    with device.timer("eval"):
        for unit in units:
            sums += unit_loss(run, run.held_out, unit, counts)
            device.sync()
        totals = device.total(sums.tolist())
    run.model.train()
    evaluated = {f"eval_{name}": total for name, total in zip(PARTS, totals, strict=True)}
    return evaluated | {"perplexity": math.exp(min(evaluated["eval_mlm_loss"], 700.0))}


def unit_loss(run: Training, text: ShardedSamples, unit: Unit, counts: tuple[int, int]) -> Tensor:
    """Give a unit's share of each of PARTS, which are means over so many tokens and samples."""
    device = run.device
    with device.timer("data"):
        samples = Samples(*map(device.put, text.samples(unit.first, unit.size)))
    weights = device.put(torch.tensor([unit.weight / count for count in counts * 2]))
    device.seed(unit.seed)
    with device.autocast(run.plan.precision):
        tokens, next_sentence = predict(run.model, samples)
    labels = samples.labels.flatten()
    sums = torch.stack(
        [
            cross_entropy(tokens, labels, reduction="sum"),
            cross_entropy(next_sentence, samples.next_sentence, reduction="sum"),
            (tokens.argmax(-1) == labels).sum(),
            (next_sentence.argmax(-1) == samples.next_sentence).sum(),
        ]
    )
    parts = sums * weights
    return torch.cat([parts[:2].sum(0, keepdim=True), parts.detach()])


def predict(model: BertForPreTraining, samples: Samples) -> tuple[Tensor, Tensor]:
    """Give the logits in each place for a masked token, and those of the next sentence."""
    hidden, pooled = model.bert(
        input_ids=samples.input_ids,
        attention_mask=samples.input_mask,
        token_type_ids=samples.segment_ids,
        return_dict=False,
    )
    # Only where tokens are masked: on all places the vocabulary's matrix would be much of the work.
    # A product with 0 and 1 is exact, and so is its gradient, which of an index would be a scatter.
    places = torch.arange(hidden.shape[1], device=hidden.device)
    chosen = (samples.positions.unsqueeze(-1) == places).to(hidden.dtype) @ hidden
    tokens, next_sentence = model.cls(chosen, pooled)
    return tokens.flatten(0, 1).float(), next_sentence.float()


def sample_flops(run: Training) -> float:
    """Count what training on a sample takes: the encoder, and the head where tokens are masked."""
    encoder = flops_per_sample(run.model.bert.encoder, run.model.config, run.plan.seq_len)
    head = sum(parameter.numel() for parameter in run.model.cls.predictions.parameters())
    return encoder + 6.0 * head * run.settings.max_pred


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the loop works with, on the device."""
    text = open_split(plan, settings, "train", device, environment)
    held_out = text
    if settings.eval_every:
        held_out = open_split(plan, settings, "eval", device, environment)
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings.optimizer,
        device,
        model.named_parameters(),
        weight_decay=settings.weight_decay,
        max_norm=settings.max_norm,
        zero1=settings.zero1,
        precision=settings.optimizer_precision,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    device.sync()
    checkpoints = open_checkpoints(plan, settings, device, environment, data=text.fingerprint)
    return Training(
        plan=plan,
        settings=settings,
        steps=total_steps(plan, epochs=settings.epochs, samples_per_epoch=text.num_samples),
        device=device,
        text=text,
        held_out=held_out,
        model=model,
        optimizer=optimizer,
        checkpoints=checkpoints,
    )


def open_split(
    plan: Plan, settings: Settings, split: str, device: Device, environment: Environment
) -> ShardedSamples:
    """Open a split of the shards to train on."""
    if not plan.data:
        raise TrainError("data.path is empty: name a directory of HDF5 shards")
    positions = plan.model["max_position_embeddings"]
    if positions < plan.seq_len:
        raise TrainError(f"seq_len is {plan.seq_len}, model.max_position_embeddings {positions}")
    return open_shards(
        Path(plan.data).expanduser(),
        split,
        beside=environment.run_dir / "data",
        device=device,
        seq_len=plan.seq_len,
        max_pred=settings.max_pred,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )


def make_model(plan: Plan, settings: Settings, device: Device) -> BertForPreTraining:
    """Make a BERT: a new one, of which the seed makes the same on every worker, or a saved one."""
    # The mask of PyTorch's fused attention depends on its values, which an XLA graph cannot.
    attention = "eager" if device.torch_device.type == "xla" else "sdpa"
    config = BertConfig(**plan.model, attn_implementation=attention)
    torch.manual_seed(plan.seed)
    model = BertForPreTraining(config)
    if settings.init_from:
        load_parameters(model, settings.init_from)
    model.to(
        device=device.torch_device,
        dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float32,
    )
    # Moving to an XLA device makes new parameters and so unties the output layer and its bias.
    model.tie_weights()
    return model


def describe(run: Training, environment: Environment) -> str:
    """Say in one block what is about to run."""
    plan, settings, text = run.plan, run.settings, run.text
    size = sum(parameter.numel() for parameter in run.model.parameters())
    return f"""\
{describe_plan(plan, environment)}
  model   {size:,} parameters, {settings.init_from or "new"}, {plan.precision}, {settings.optimizer}
  data    {text.num_samples:,} samples of {text.seq_len} tokens, {text.max_pred} masked at most
  steps   {run.steps:,} of {plan.batch.global_batch:,} samples each"""


if __name__ == "__main__":
    run_job(main)
