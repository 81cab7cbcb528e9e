"""Fine-tune BERT to tell texts apart. In a run directory, on each node (here: one, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_sentiment/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.labelled import Labelled, LabelledSamples, open_labelled
from trnslurm.train.data.units import Unit, eval_units, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.agreement import conclude
from trnslurm.train.loop.job import check_world, run_job
from trnslurm.train.loop.progress import Progress, flops_per_sample
from trnslurm.train.loop.schedule import SaveTimes, due, learning_rate, steps_to_run, total_steps
from trnslurm.train.loop.scores import classification_scores, count_pairs
from trnslurm.train.loop.supervision import Supervision
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.optimizer import GlobalOptimizer
from trnslurm.train.plan import Plan, describe_plan, parse_plan, read_settings
from trnslurm.train.say import say
from trnslurm.train.settings import CommonSettings

PARTS = ("loss", "accuracy")
"""What is reported of a step: the loss, and the share of its samples that was told right."""

RATES = {"samples/s": "samples_per_s"}
"""What the console shows of the speed."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    optimizer_precision: str
    keep_best: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    steps: int
    """Of the whole training, however many runs it takes: the schedule ends there."""
    device: Device
    text: Labelled
    held_out: Labelled
    model: BertForSequenceClassification
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Fine-tune BERT to tell texts apart.")
    settings = read_settings(Settings, plan, not_zero=("log_every",))
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
    plan = run.plan
    done = run.checkpoints.resume(run.optimizer)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        plan,
        environment,
        run.device,
        steps=steps,
        log_every=run.settings.log_every,
        flops_per_sample=flops_per_sample(run.model.bert.encoder, run.model.config, plan.seq_len),
        parts=PARTS,
        rates=RATES,
        ask=saves.overdue,
    )

    # Go!
    with Supervision(plan, run.settings, run.device, environment, progress) as supervision:
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
        for unit in worker_units(plan, worker=device.rank, step=step):
            numbers = unit_loss(run, unit)
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
        scores = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        if due(settings.eval_every, done, also=(steps.start + 1, steps.stop)):
            scores = evaluate(run)
        evaluated = {f"eval_{name}": score for name, score in scores.items()}
        overdue = progress.note(done, loss=step_sums, grad_norm=grad_norm, lr=lr, **evaluated)
        stops = supervision.step_done(done)
        if saves.due(done, overdue=overdue or stops):
            progress.report()
            run.checkpoints.save(
                step=done,
                samples=done * samples,
                optimizer=run.optimizer,
                score=scores.get(settings.keep_best),
            )
        run.checkpoints.poll()
        if stops:
            break


def unit_loss(run: Training, unit: Unit) -> Tensor:
    """Give a unit's share of each of PARTS, which are means over the global batch."""
    device = run.device
    samples = on_device(device, run.text.samples(unit.first, unit.size))
    # A vector, because torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    weights = device.put(torch.full((unit.size,), unit.weight / run.plan.batch.global_batch))
    device.seed(unit.seed)
    logits = logits_of(run, samples)
    right = (logits.detach().argmax(-1) == samples.labels) * weights
    return torch.stack([sum_losses(logits, samples.labels, weights), right.sum()])


@torch.no_grad()
def evaluate(run: Training) -> dict[str, float]:
    """Give the loss and the scores on held-out samples, the same whatever the worker count."""
    plan, device, held_out = run.plan, run.device, run.held_out
    wanted = min(run.settings.eval_samples or held_out.num_samples, held_out.num_samples)
    sums = device.put(torch.zeros(1 + held_out.num_outputs**2))
    run.model.eval()
    with device.timer("eval"):
        for unit in eval_units(plan, worker=device.rank, samples=wanted):
            samples = on_device(device, held_out.fixed(unit.first, unit.size))
            # Of the last unit some may lie beyond the last sample: those do not count.
            inside = torch.arange(unit.first, unit.first + unit.size) < wanted
            weights = device.put(inside * unit.weight)
            logits = logits_of(run, samples)
            loss = sum_losses(logits, samples.labels, weights)
            taken = logits.argmax(-1)
            pairs = count_pairs(taken, samples.labels, weights, num_labels=held_out.num_outputs)
            sums += torch.cat([loss.unsqueeze(0), pairs.flatten()])
            device.sync()
        loss, *counts = device.total(sums.tolist())
    run.model.train()
    return {"loss": loss / wanted} | classification_scores(held_out.metrics, counts)


def on_device(device: Device, samples: LabelledSamples) -> LabelledSamples:
    """Copy samples to the device."""
    with device.timer("data"):
        return LabelledSamples(**{name: device.put(part) for name, part in vars(samples).items()})


def logits_of(run: Training, samples: LabelledSamples) -> Tensor:
    """Run the model."""
    with run.device.autocast(run.plan.precision):
        output = run.model(
            input_ids=samples.input_ids,
            attention_mask=samples.attention_mask,
            token_type_ids=samples.token_type_ids,
        )
    return output.logits.float()


def sum_losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Add up the samples' losses, each with its weight."""
    return (cross_entropy(logits, labels, reduction="none") * weights).sum()


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the loop works with, on the device."""
    text = open_split(plan, "train")
    held_out = open_split(plan, "eval") if settings.eval_every else text
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings.optimizer,
        device,
        model.named_parameters(),
        weight_decay=settings.weight_decay,
        max_norm=settings.max_norm,
        zero1=False,
        precision=settings.optimizer_precision,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    device.sync()
    checkpoints = open_checkpoints(
        plan,
        settings,
        device,
        environment,
        data=text.fingerprint,
        keep_best=settings.keep_best,
        scores=("loss", *held_out.metrics),
    )
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


def open_split(plan: Plan, split: str) -> Labelled:
    """Open a split of the labelled data to train on."""
    if not plan.data:
        raise TrainError("data.path is empty: name a directory of labelled data")
    positions = plan.model["max_position_embeddings"]
    if positions < plan.seq_len:
        raise TrainError(f"seq_len is {plan.seq_len}, model.max_position_embeddings {positions}")
    text = open_labelled(
        Path(plan.data).expanduser(),
        split,
        seq_len=plan.seq_len,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )
    if not text.labels:
        raise TrainError(f"{plan.data}: its labels are numbers on a scale: train bert_mrpc on them")
    if text.num_outputs != plan.model["num_labels"]:
        raise TrainError(
            f"model.num_labels is {plan.model['num_labels']}, but {plan.data} has the labels "
            f"{', '.join(text.labels)}: set model.num_labels={text.num_outputs}"
        )
    return text


def make_model(plan: Plan, settings: Settings, device: Device) -> BertForSequenceClassification:
    """Make a BERT with a new head, of which the seed makes the same on every worker."""
    # The mask of PyTorch's fused attention depends on its values, which an XLA graph cannot.
    attention = "eager" if device.torch_device.type == "xla" else "sdpa"
    config = BertConfig(**plan.model, attn_implementation=attention)
    torch.manual_seed(plan.seed)
    model = BertForSequenceClassification(config)
    if settings.init_from:
        load_parameters(model, settings.init_from, own=("classifier.",))
    return model.to(
        device=device.torch_device,
        dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float32,
    )


def describe(run: Training, environment: Environment) -> str:
    """Say in one block what is about to run."""
    plan, settings, text = run.plan, run.settings, run.text
    size = sum(parameter.numel() for parameter in run.model.parameters())
    return f"""\
{describe_plan(plan, environment)}
  model   {size:,} parameters, {settings.init_from or "new"}, {plan.precision}, {settings.optimizer}
  data    {text.num_samples:,} samples of {plan.seq_len} tokens: {", ".join(text.labels)}
  steps   {run.steps:,} of {plan.batch.global_batch:,} samples each"""


if __name__ == "__main__":
    run_job(main)
