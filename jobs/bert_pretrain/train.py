"""Pretrain BERT. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/bert_pretrain/train.py plan.json

plan.json has all settings. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertForPreTraining

from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.shards.index import ShardSplit
from trnslurm.train.data.shards.reader import Samples, ShardedSamples, open_shards
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.encoders import make_config
from trnslurm.train.loop.job import TrainingJob, open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters, flops_per_sample
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.models import Bert, PublishedBert
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings, Free, OptimizerPrecision, Positive

PARTS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy")
"""The loss, and its parts: masked tokens (MLM) and next sentences (NSP)."""

RATES = {"seq/s": "samples_per_s", "tokens/s": "tokens_per_s"}
"""The rates that the console shows; seq/s is the tutorial's."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    eval_samples: Free[Positive[int]]
    """The number of samples of the test shards."""
    max_pred: Positive[int]
    """Maximum number of masked tokens per sample, as in the shards."""
    zero1: bool
    """Split the optimizer's state over the workers of XLA devices."""
    optimizer_precision: OptimizerPrecision
    """What the optimizer updates in bf16: fp32 copies or the parameters themselves."""
    expected_samples_per_s: Free[float]
    """Warn at the end if the mean rate is below 95 % of this; 0: no warning."""

    REFUSED = (
        ({"data.path": ""}, "name a directory of HDF5 shards"),
        (
            {"optimizer": "lamb", "zero1": True},
            "lamb needs the norms of whole parameters, but with ZeRO-1 a worker has parts of them: "
            "set train.zero1=false, or use adamw",
        ),
        (
            {"optimizer_precision": "fp32_state", "zero1": True},
            "ZeRO-1 has one type for parameters and state: set train.zero1=false, or use "
            "fp32_copy or as_model",
        ),
    )


class Model(Bert):
    """The recipe's model section."""

    name: PublishedBert
    """A published model, whose sizes replace those below; empty: none."""


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Pretrain BERT.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_split(job, "train")
    held_out = open_split(job, "eval") if settings.eval_every else text
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings,
        device,
        model.named_parameters(),
        zero1=settings.zero1,
        precision=settings.optimizer_precision,
    )
    # The encoder, and the head where tokens are masked.
    head = 6.0 * count_parameters(model.cls.predictions) * settings.max_pred
    run = TrainingRun(
        job,
        optimizer,
        data=text.fingerprint,
        samples_per_epoch=text.num_samples,
        reporting=Reporting(
            flops_per_sample=flops_per_sample(model.bert.encoder, model.config, plan.seq_len)
            + head,
            parts=PARTS,
            rates=RATES,
            expected_samples_per_s=settings.expected_samples_per_s,
        ),
    )
    run.describe(
        count_parameters(model),
        data=f"{text.num_samples:,} samples of {text.seq_len} tokens, {text.max_pred} masked at "
        "most",
        each=f"{plan.batch.global_batch:,} samples",
    )

    def evaluate() -> dict[str, float]:
        wanted = min(settings.eval_samples, held_out.num_samples)
        # The last unit may reach beyond them, and counts whole.
        seen = -(-wanted // plan.batch.micro_batch) * plan.batch.micro_batch
        counts = (held_out.masked_tokens(0, seen), seen)
        totals = run.evaluate(
            model,
            lambda unit: unit_loss(model, device, plan, held_out, unit, counts),
            samples=wanted,
        )
        scores = {f"eval_{name}": total for name, total in zip(PARTS, totals, strict=True)}
        return scores | {"perplexity": math.exp(min(scores["eval_mlm_loss"], 700.0))}

    # Go! Every unit is a separate graph, and so is the end of a step.
    samples = plan.batch.global_batch
    model.train()
    for step in run.steps():
        counts = (text.masked_tokens((step - 1) * samples, samples), samples)
        for unit in run.units(step):
            numbers = unit_loss(model, device, plan, text, unit, counts)
            numbers[0].backward()
            run.add(numbers)
        run.end(step, optimizer.step(run.lr(step)), evaluate=evaluate)
    run.close(model.parameters)
    for split in (text, held_out):
        split.close()


def unit_loss(
    model: BertForPreTraining,
    device: Device,
    plan: JobPlan,
    text: ShardedSamples,
    unit: Unit,
    counts: tuple[int, int],
) -> Tensor:
    """Return a unit's share of each of PARTS, which are means over these counts."""
    with device.timer("data"):
        shares = unit.share_of(*counts, *counts)
        *columns, shares = device.put_all([*text.samples(unit.first, unit.size), shares])
    samples = Samples(*columns)
    device.seed(unit.seed)
    with device.autocast(plan.precision):
        tokens, next_sentence = predict(model, samples)
    labels = samples.labels.flatten()
    sums = torch.stack(
        [
            cross_entropy(tokens, labels, reduction="sum"),
            cross_entropy(next_sentence, samples.next_sentence, reduction="sum"),
            (tokens.argmax(-1) == labels).sum(),
            (next_sentence.argmax(-1) == samples.next_sentence).sum(),
        ]
    )
    parts = sums * shares
    return torch.cat([parts[:2].sum(0, keepdim=True), parts.detach()])


def predict(model: BertForPreTraining, samples: Samples) -> tuple[Tensor, Tensor]:
    """Return the logits of each masked position, and those of the next sentence."""
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


def open_split(job: TrainingJob[Settings], split: str) -> ShardedSamples:
    """Open a split of the shards to train on."""
    plan = job.plan
    return open_shards(
        ShardSplit(Path(plan.data).expanduser(), split, job.environment.run_dir / "data"),
        device=job.device,
        seq_len=plan.seq_len,
        max_pred=job.settings.max_pred,
        vocab_size=plan.model["vocab_size"],
        seed=plan.seed,
    )


def make_model(plan: JobPlan, settings: Settings, device: Device) -> BertForPreTraining:
    """Make a BERT: a saved one, or a new one, which the seed makes the same on every worker."""
    # The mask of PyTorch's fused attention depends on its values, which an XLA graph cannot.
    attention = "eager" if device.torch_device.type == "xla" else "sdpa"
    config = make_config(plan.model, attn_implementation=attention)
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
    device.compile_layers(model)
    return model


if __name__ == "__main__":
    run_job(main)
