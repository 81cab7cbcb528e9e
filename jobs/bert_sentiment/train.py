"""Fine-tune BERT to classify texts. In a run directory, on each node (here: one, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_sentiment/train.py plan.json

plan.json has all settings. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trnslurm.train.classifier import (
    classifier_flops,
    make_classifier,
    on_device,
    open_split,
    predict,
    read_unit,
)
from trnslurm.train.data.labelled import Labelled
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.loop.scores import classification_scores, count_pairs
from trnslurm.train.models import Encoder
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import Free, OptimizerPrecision, Positive, ScoredSettings

PARTS = ("loss", "accuracy")
"""What is reported for a step: the loss, and the share of samples classified correctly."""

RATES = {"samples/s": "samples_per_s"}
"""The rates that the console shows."""


@dataclass(frozen=True, kw_only=True)
class Settings(ScoredSettings):
    """The recipe's train section."""

    optimizer_precision: OptimizerPrecision
    """What the optimizer updates in bf16: fp32 copies or the parameters themselves."""
    keep_best: Free[Literal["", "loss", "accuracy", "f1", "macro_f1", "matthews"]]

    REFUSED = (({"data.path": ""}, "name a directory of labelled data"),)


class Model(Encoder):
    """The recipe's model section."""

    num_labels: Positive[int]
    """Number of outputs of the head; 1: labels are numbers on a scale."""


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Fine-tune BERT to classify texts.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_texts(plan, "train")
    held_out = open_texts(plan, "eval") if settings.eval_every else text
    model = make_classifier(plan, settings.init_from, device)
    optimizer = make_optimizer(
        settings,
        device,
        model.named_parameters(),
        zero1=False,
        precision=settings.optimizer_precision,
    )
    run = TrainingRun(
        job,
        optimizer,
        data=text.fingerprint,
        samples_per_epoch=text.num_samples,
        reporting=Reporting(
            flops_per_sample=classifier_flops(model, plan.seq_len), parts=PARTS, rates=RATES
        ),
        scores=("loss", *held_out.metrics),
    )
    run.describe(
        count_parameters(model),
        data=f"{text.num_samples:,} samples of {plan.seq_len} tokens: {', '.join(text.labels)}",
        each=f"{plan.batch.global_batch:,} samples",
    )

    # Go! Every unit is a separate graph, and so is the end of a step.
    model.train()
    for step in run.steps():
        for unit in run.units(step):
            numbers = unit_loss(model, device, plan, text, unit)
            numbers[0].backward()
            run.add(numbers)
        grad_norm = optimizer.step(run.lr(step))
        run.end(step, grad_norm, evaluate=lambda: evaluate(run, model, settings, held_out))
    run.close(model.parameters)


def unit_loss(model: Any, device: Device, plan: JobPlan, text: Labelled, unit: Unit) -> Tensor:
    """Return a unit's share of each of PARTS, which are means over the global batch."""
    samples = read_unit(device, text, unit)
    shares = device.put(unit.share_of(plan.batch.global_batch).repeat(unit.size))
    device.seed(unit.seed)
    logits = predict(model, device, plan.precision, samples)
    loss = (cross_entropy(logits, samples.labels, reduction="none") * shares).sum()
    right = (logits.detach().argmax(-1) == samples.labels) * shares
    return torch.stack([loss, right.sum()])


def evaluate(
    run: TrainingRun, model: Any, settings: Settings, held_out: Labelled
) -> dict[str, float]:
    """Return the loss and the scores on held-out samples."""
    plan, device = run.plan, run.device
    wanted = min(settings.eval_samples or held_out.num_samples, held_out.num_samples)

    def count(unit: Unit) -> Tensor:
        samples = on_device(device, held_out.fixed(unit.first, unit.size))
        # The last unit may reach beyond the last sample: what lies there does not count.
        inside = torch.arange(unit.first, unit.first + unit.size) < wanted
        weights = device.put(inside * unit.weight)
        logits = predict(model, device, plan.precision, samples)
        loss = (cross_entropy(logits, samples.labels, reduction="none") * weights).sum()
        pairs = count_pairs(
            logits.argmax(-1), samples.labels, weights, num_labels=held_out.num_outputs
        )
        return torch.cat([loss.unsqueeze(0), pairs.flatten()])

    width = 1 + held_out.num_outputs**2
    loss, *counts = run.evaluate(model, count, samples=wanted, width=width)
    scores = {"loss": loss / wanted} | classification_scores(held_out.metrics, counts)
    return {f"eval_{name}": score for name, score in scores.items()}


def open_texts(plan: JobPlan, split: str) -> Labelled:
    """Open a split of the labelled data to train on."""
    text = open_split(plan, split)
    if not text.labels:
        raise TrainError(
            f"{plan.data}: its labels are numbers on a scale: use the recipe bert_mrpc"
        )
    return text


if __name__ == "__main__":
    run_job(main)
