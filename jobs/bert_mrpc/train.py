"""Fine-tune BERT on labelled sentences, with the Hugging Face Trainer. In a run directory:

    export USE_TORCH_XLA=0
    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_mrpc/train.py plan.json

plan.json holds every number. TRNSLURM_PHASE=precompile runs a few steps, only to see every graph.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.labelled import Labelled, open_labelled
from trnslurm.train.data.units import Unit, eval_units, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.agreement import conclude
from trnslurm.train.loop.job import check_world, run_job
from trnslurm.train.loop.predictions import gather_rows, score, sum_losses
from trnslurm.train.loop.progress import Progress, flops_per_sample
from trnslurm.train.loop.schedule import SaveTimes, due, steps_to_run, total_steps
from trnslurm.train.loop.supervision import Supervision
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.optimizer import GlobalOptimizer
from trnslurm.train.plan import Plan, describe_plan, parse_plan, read_settings
from trnslurm.train.say import say
from trnslurm.train.settings import CommonSettings
from trnslurm.train.trainer import UnitTrainer


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    optimizer_precision: str
    eval_in_precompile: bool


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the steps work with."""

    plan: Plan
    settings: Settings
    steps: int
    """Of the whole training, however many runs it takes: the schedule ends there."""
    device: Device
    text: Labelled
    held_out: dict[str, Labelled]
    """By what the names of their scores begin with; MNLI has two."""
    model: BertForSequenceClassification
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Fine-tune BERT on labelled sentences.")
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
    plan, device = run.plan, run.device
    done = run.checkpoints.resume(run.optimizer)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        plan,
        environment,
        device,
        steps=steps,
        log_every=run.settings.log_every,
        flops_per_sample=flops_per_sample(run.model.bert.encoder, run.model.config, plan.seq_len),
        ask=saves.overdue,
    )
    trainer = UnitTrainer(
        device,
        plan,
        run.settings,
        environment,
        model=run.model,
        optimizer=run.optimizer,
        steps=steps,
        total_steps=run.steps,
        units=lambda step: worker_units(plan, worker=device.rank, step=step),
        unit_loss=lambda unit: unit_loss(run, unit),
    )

    # Go!
    with Supervision(plan, run.settings, device, environment, progress) as supervision:
        trains = environment.phase == "train"
        trainer.add_callback(AfterStep(run, trainer, progress, saves, supervision, trains=trains))
        if steps:
            trainer.train()

    run.checkpoints.require_last()
    progress.close()
    if not supervision.stopped:  # or every second may count
        conclude(device, run.model, environment)
    return supervision


def unit_loss(run: Training, unit: Unit) -> Tensor:
    """Give a unit's share of the mean loss over the global batch."""
    device = run.device
    with device.timer("data"):
        samples = run.text.samples(unit.first, unit.size)
        labels = device.put(samples.labels)
    # A vector, because torch_xla compiles a 0-dimensional tensor of exactly 0 or 1 into the graph.
    weight = device.put(torch.tensor([unit.weight / run.plan.batch.global_batch]))
    return sum_losses(logits_of(run, samples), labels) * weight


def logits_of(run: Training, samples: Any) -> Tensor:
    """Run the model. All samples are padded to seq_len: lengths that vary would compile again and
    again, and workers with different graphs hang on Trainium (token classification in AWS's
    tutorial: "Timeout waiting for RX", answered there by --pad_to_max_length)."""
    device = run.device
    with device.autocast(run.plan.precision):
        output = run.model(
            input_ids=device.put(samples.input_ids),
            attention_mask=device.put(samples.attention_mask),
            token_type_ids=device.put(samples.token_type_ids),
        )
    return output.logits.float()


@torch.no_grad()
def predict(run: Training, text: Labelled) -> Tensor:
    """Give the logits of held-out samples in their order, whatever the worker count.

    Not by Trainer.evaluate, and so without what AWS's tutorial has to work around there:

    - During graph extraction (NEURON_EXTRACT_GRAPHS_ONLY=1) accelerate's pad_across_processes cuts
      and pads by sizes that nobody has computed: "Input dimension should be either 1 or equal to
      the output dimension". Here no shape depends on a number from the device.
    - Trainer joins the logits of all batches so far on the device, a new graph for each
      (huggingface/transformers#37593; in 4.52 only with eval_do_concat_batches=False), and its last
      batch is shorter. Here every unit is as large as in training, and its logits stay apart.
    - accelerate gathers with pickles or xm.mesh_reduce ("EOFError: Ran out of input", torch-neuronx
      2.1). Here numbers are summed, as those of every report are.
    """
    plan, device = run.plan, run.device
    count = min(run.settings.eval_samples or text.num_samples, text.num_samples)
    units = eval_units(plan, worker=device.rank, samples=count)
    rows = torch.zeros(count, run.model.config.num_labels)
    run.model.eval()
    with device.timer("eval"):
        logits = []
        for unit in units:
            logits.append(logits_of(run, text.fixed(unit.first, unit.size)))
            device.sync()
        for unit, found in zip(units, logits, strict=True):
            if unit.weight:
                part = rows[unit.first : unit.first + unit.size]
                part.copy_(found.cpu()[: len(part)])
        whole = gather_rows(device, rows)
    run.model.train()
    return whole


@dataclass
class AfterStep(TrainerCallback):
    """What follows a step: evaluation, the report, a checkpoint, a stop."""

    run: Training
    trainer: UnitTrainer
    progress: Progress
    saves: SaveTimes
    supervision: Supervision
    trains: bool
    """Not so in a precompile. What that predicts is nothing, and to score it could only fail, as in
    AWS's tutorial, harmlessly: "Target is multiclass but average='binary'"."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer has taken a step, and zeroed the gradients."""
        run, progress, done = self.run, self.progress, state.global_step
        loss, step = self.trainer.end_step(), self.trainer.global_step
        evaluated = {}
        # After the first step as well, so that its graph does not come as a surprise later.
        also = (progress.steps.start + 1, progress.steps.stop)
        evaluates = self.trains or run.settings.eval_in_precompile
        if evaluates and due(run.settings.eval_every, done, also=also):
            for name, text in run.held_out.items():
                logits = predict(run, text)
                scores = score(text, logits) if self.trains else {}
                evaluated |= {f"{name}_{key}": value for key, value in scores.items()}
        overdue = progress.note(done, loss=loss, grad_norm=step.grad_norm, lr=step.lr, **evaluated)
        stops = self.supervision.step_done(done)
        if self.saves.due(done, overdue=overdue or stops):
            progress.report()
            samples = done * run.plan.batch.global_batch
            run.checkpoints.save(step=done, samples=samples, optimizer=run.optimizer)
        run.checkpoints.poll()
        control.should_training_stop |= stops


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the steps work with, on the device."""
    text = open_split(plan, "train")
    names = [name for name in text.index.splits if name != "train"] or ["eval"]
    held_out = {name: open_split(plan, name) for name in names if settings.eval_every}
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


def open_split(plan: Plan, split: str) -> Labelled:
    """Open a split of the labelled data to train on."""
    if not plan.data:
        raise TrainError("data.path is empty: name a directory of labelled data")
    if (positions := plan.model["max_position_embeddings"]) < plan.seq_len:
        raise TrainError(f"seq_len is {plan.seq_len}, model.max_position_embeddings {positions}")
    text = open_labelled(
        Path(plan.data).expanduser(),
        split,
        seq_len=plan.seq_len,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )
    if text.num_outputs != plan.model["num_labels"]:
        raise TrainError(
            f"model.num_labels is {plan.model['num_labels']}, but {plan.data} has "
            f"{', '.join(text.labels) or 'numbers on a scale'}: "
            f"set model.num_labels={text.num_outputs}"
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
    plan, settings, text, index = run.plan, run.settings, run.text, run.text.index
    size = sum(parameter.numel() for parameter in run.model.parameters())
    return f"""\
{describe_plan(plan, environment)}
  model   {size:,} parameters, {settings.init_from or "new"}, {plan.precision}, {settings.optimizer}
  data    {text.task or "labelled"}: {text.num_samples:,} samples, \
{", ".join(text.labels) or "numbers on a scale"}
  tokens  {index.vocab_size:,} of {index.tokenizer.name}, {plan.model["vocab_size"]:,} of the model
  steps   {run.steps:,} of {plan.batch.global_batch:,} samples each"""


if __name__ == "__main__":
    run_job(main)
