"""Fine-tune BERT to label words, such as names. In a run directory, on each node:

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_ner/train.py plan.json

plan.json has all settings. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
from trnslurm.train.data.labelled import UNLABELLED, Labelled
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.loop.scores import count_words, entity_scores
from trnslurm.train.models import Encoder
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import Free, OptimizerPrecision, ScoredSettings

PARTS = ("loss", "accuracy")
"""What is reported for a step: the loss, and the share of words that were labelled correctly."""

RATES = {"samples/s": "samples_per_s"}
"""The rates that the console shows."""


@dataclass(frozen=True, kw_only=True)
class Settings(ScoredSettings):
    """The recipe's train section."""

    optimizer_precision: OptimizerPrecision
    """What the optimizer updates in bf16: fp32 copies or the parameters themselves."""
    keep_best: Free[
        Literal["", "loss", "accuracy", "entity_f1", "entity_precision", "entity_recall"]
    ]

    REFUSED = (({"data.path": ""}, "name a directory of labelled data"),)


class Model(Encoder):
    """The recipe's model section."""

    num_labels: Annotated[int, "at least 2"]
    """Number of labels that a word can have."""


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Fine-tune BERT to label words.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_split(plan, "train", of_words=True)
    held_out = open_split(plan, "eval", of_words=True) if settings.eval_every else text
    model = make_classifier(plan, settings.init_from, device, of_words=True)
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
    samples = plan.batch.global_batch
    model.train()
    for step in run.steps():
        words = text.labelled_words((step - 1) * samples, samples)
        for unit in run.units(step):
            numbers = unit_loss(model, device, plan, text, unit, words)
            numbers[0].backward()
            run.add(numbers)
        grad_norm = optimizer.step(run.lr(step))
        run.end(step, grad_norm, evaluate=lambda: evaluate(run, model, settings, held_out))
    run.close(model.parameters)


def unit_loss(
    model: Any, device: Device, plan: JobPlan, text: Labelled, unit: Unit, words: int
) -> Tensor:
    """Return a unit's share of each of PARTS, which are means over the words of the step.

    transformers' own loss is a mean over the words of the unit, so the words of units with few
    words would count more.
    """
    samples = read_unit(device, text, unit)
    shares = device.put(unit.share_of(words, words))
    device.seed(unit.seed)
    logits = predict(model, device, plan.precision, samples)
    right = (logits.detach().argmax(-1) == samples.labels).sum()
    return torch.stack([sum_losses(logits, samples.labels), right]) * shares


def evaluate(
    run: TrainingRun, model: Any, settings: Settings, held_out: Labelled
) -> dict[str, float]:
    """Return the loss and the scores on held-out samples."""
    plan, device, names = run.plan, run.device, held_out.labels
    wanted = min(settings.eval_samples or held_out.num_samples, held_out.num_samples)
    told: list[tuple[Tensor, Tensor]] = []

    def tell(unit: Unit) -> Tensor:
        samples = held_out.fixed(unit.first, unit.size)
        # The last unit may reach beyond the last sample: what lies there does not count.
        beyond = torch.arange(unit.first, unit.first + unit.size) >= wanted
        samples.labels[beyond if unit.weight else slice(None)] = UNLABELLED
        logits = predict(model, device, plan.precision, on_device(device, samples))
        told.append((logits.argmax(-1), samples.labels))
        return sum_losses(logits, device.put(samples.labels)).unsqueeze(0)

    [loss] = run.evaluate(model, tell, samples=wanted, width=1)
    counts = [0] * 5
    # Entities are found on the host. What a precompile predicts means nothing, and may be no label.
    for predicted, labels in told if run.trains else ():
        for guess, truth in zip(predicted.cpu(), labels, strict=True):
            of_words = truth != UNLABELLED
            both = ([names[n] for n in part[of_words]] for part in (guess, truth))
            counts = [one + more for one, more in zip(counts, count_words(*both), strict=True)]
    totals = device.total([float(count) for count in counts])
    scores = {"loss": loss / max(totals[-1], 1.0)} | entity_scores(held_out.metrics, totals)
    return {f"eval_{name}": score for name, score in scores.items()}


def sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all words."""
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=UNLABELLED
    )


if __name__ == "__main__":
    run_job(main)
