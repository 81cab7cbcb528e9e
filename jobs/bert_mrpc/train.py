"""Fine-tune BERT on labelled sentences, with the Hugging Face Trainer. In a run directory:

    export USE_TORCH_XLA=0
    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_mrpc/train.py plan.json

plan.json has all settings. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trnslurm.train.classifier import (
    classifier_flops,
    make_classifier,
    on_device,
    open_split,
    predict,
    read_unit,
)
from trnslurm.train.data.labelled import Labelled
from trnslurm.train.data.units import Unit, eval_units
from trnslurm.train.devices.device import Device
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.loop.scores import gather_rows, score, sum_losses
from trnslurm.train.models import Encoder
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings, OptimizerPrecision, Positive
from trnslurm.train.trainer import UnitTrainer


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    optimizer_precision: OptimizerPrecision
    """What the optimizer updates in bf16: fp32 copies or the parameters themselves."""
    eval_in_precompile: bool
    """If false, its graph is compiled during training, as with --do_train alone."""

    REFUSED = (({"data.path": ""}, "name a directory of labelled data"),)


class Model(Encoder):
    """The recipe's model section."""

    num_labels: Positive[int]
    """Number of outputs of the head; 1: labels are numbers on a scale."""


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Fine-tune BERT on labelled sentences.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_split(plan, "train")
    # MNLI has two: the scores of each begin with its name.
    names = [name for name in text.index.splits if name != "train"] or ["eval"]
    held_out = {name: open_split(plan, name) for name in names if settings.eval_every}
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
        reporting=Reporting(flops_per_sample=classifier_flops(model, plan.seq_len)),
    )
    labels = ", ".join(text.labels) or "numbers on a scale"
    tokens = f"{text.index.vocab_size:,} of {text.index.tokenizer.name}"
    run.describe(
        count_parameters(model),
        data=f"{text.task or 'labelled'}: {text.num_samples:,} samples, {labels}",
        tokens=f"{tokens}, {plan.model['vocab_size']:,} of the model",
        each=f"{plan.batch.global_batch:,} samples",
    )

    def evaluate() -> dict[str, float]:
        evaluated = {}
        for name, split in held_out.items():
            logits = predict_all(run, model, split, settings.eval_samples)
            # What a precompile predicts means nothing, and to score it could only fail, as in AWS's
            # tutorial, harmlessly: "Target is multiclass but average='binary'".
            scores = score(split, logits) if run.trains else {}
            evaluated |= {f"{name}_{key}": value for key, value in scores.items()}
        return evaluated

    # Go! Trainer runs the steps of the run, and ends each as other jobs do.
    UnitTrainer(
        run,
        model,
        lambda unit: unit_loss(model, device, plan, text, unit),
        evaluate=evaluate if run.trains or settings.eval_in_precompile else None,
    ).train()
    run.close(model.parameters)


def unit_loss(model: Any, device: Device, plan: JobPlan, text: Labelled, unit: Unit) -> Tensor:
    """Return a unit's share of the mean loss over the global batch."""
    samples = read_unit(device, text, unit)
    share = device.put(unit.share_of(plan.batch.global_batch))
    device.seed(unit.seed)
    # All samples are padded to seq_len: lengths that vary would compile again and again, and
    # workers with different graphs hang on Trainium (token classification in AWS's tutorial:
    # "Timeout waiting for RX", answered there by --pad_to_max_length).
    return sum_losses(predict(model, device, plan.precision, samples), samples.labels) * share


@torch.no_grad()
def predict_all(run: TrainingRun, model: Any, text: Labelled, samples: int) -> Tensor:
    """Return the logits of held-out samples in their order, for any number of workers.

    Trainer.evaluate is not used, so the workarounds in AWS's tutorial are not needed:

    - During graph extraction (NEURON_EXTRACT_GRAPHS_ONLY=1), accelerate's pad_across_processes
      slices and pads by sizes that have not been computed: "Input dimension should be either
      1 or equal to the output dimension". Here no shape depends on a number from the device.
    - Trainer joins the logits of all batches so far on the device, with a new graph for each
      (huggingface/transformers#37593; in 4.52 only with eval_do_concat_batches=False), and its last
      batch is shorter. Here every unit is as large as in training, and its logits stay separate.
    - accelerate gathers with pickles or xm.mesh_reduce ("EOFError: Ran out of input", torch-neuronx
      2.1). Here numbers are summed, as in every report.
    """
    plan, device = run.plan, run.device
    count = min(samples or text.num_samples, text.num_samples)
    units = eval_units(plan, worker=device.rank, samples=count)
    rows = torch.zeros(count, model.config.num_labels)
    model.eval()
    with device.timer("eval"):
        logits = []
        for unit in units:
            part = on_device(device, text.fixed(unit.first, unit.size))
            logits.append(predict(model, device, plan.precision, part))
            device.sync()
        for unit, found in zip(units, logits, strict=True):
            if unit.weight:
                own = rows[unit.first : unit.first + unit.size]
                own.copy_(found.cpu()[: len(own)])
        whole = gather_rows(device, rows)
    model.train()
    return whole


if __name__ == "__main__":
    run_job(main)
