"""Train GPT-2 with ZeRO-1. In a run directory, on each node (here: one node, two workers):

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/gpt2_zero1/train.py plan.json

plan.json has all settings. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import AdamW, Optimizer
from transformers import AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from trnslurm.train.checkpoint.pretrained import load_parameters
from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters, flops_per_sample
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.models import Gpt2
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.muon import Muon
from trnslurm.train.optim.optimizer import decay_matrices
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings, Free, Positive


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    optimizer: Literal["adamw", "adam", "sgd", "muon"]
    """AdamW, Adam, SGD to compare runs exactly, or Muon (AdamW for all but layers' matrices)."""
    optimizer_precision: Literal["fp32_copy", "as_model"]
    """What ZeRO-1 divides in bf16: fp32 copies of the parameters, or the parameters themselves."""
    eval_samples: Free[Positive[int]]
    """The number of held-out samples."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""

    REFUSED = (
        (
            {"optimizer": "muon", "device": ["neuron", "xla-cpu", "xla-cuda"]},
            "its AdamW counts steps in numbers that XLA would compile in: use adamw, or device "
            "cpu or cuda",
        ),
    )


class Model(Gpt2):
    """The recipe's model section."""


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Train GPT-2 with ZeRO-1.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_split(plan, "train")
    held_out = open_split(plan, "eval") if settings.eval_every else text
    model = make_model(plan, settings, device)
    optimizer = make_optimizer(
        settings,
        device,
        model.named_parameters(),
        partial(muon_and_adamw, plan, settings) if settings.optimizer == "muon" else None,
        zero1=True,
        precision=settings.optimizer_precision,
    )
    run = TrainingRun(
        job,
        optimizer,
        data=text.fingerprint,
        samples_per_epoch=text.num_blocks,
        reporting=Reporting(flops_per_sample=flops_per_sample(model, model.config, plan.seq_len)),
    )
    run.describe(
        count_parameters(model),
        data=f"{text.num_tokens:,} tokens in {text.num_blocks:,} blocks of {plan.seq_len}",
        each=f"{plan.batch.global_batch * plan.seq_len:,} tokens",
    )
    # Packed text has no padding: every token of a sample but the first is predicted.
    predicted = plan.seq_len - 1

    def evaluate() -> dict[str, float]:
        tokens = settings.eval_samples * predicted
        [loss] = run.evaluate(
            model,
            lambda unit: unit_loss(model, device, plan, held_out, unit, tokens),
            samples=settings.eval_samples,
        )
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    # Go! Every unit is a separate graph, and so is the end of a step.
    tokens = plan.batch.global_batch * predicted
    model.train()
    for step in run.steps():
        for unit in run.units(step):
            loss = unit_loss(model, device, plan, text, unit, tokens)
            loss.backward()
            run.add(loss)
        run.end(step, optimizer.step(run.lr(step)), evaluate=evaluate)
    run.close(model.parameters)


def unit_loss(
    model: GPT2LMHeadModel, device: Device, plan: JobPlan, text: Text, unit: Unit, valid_tokens: int
) -> Tensor:
    """Return a unit's share of the mean loss over `valid_tokens` tokens."""
    with device.timer("data"):
        share = unit.share_of(valid_tokens)
        tokens, share = device.put_all([text.samples(unit.first, unit.size), share])
    device.seed(unit.seed)
    with device.autocast(plan.precision):
        logits = model(tokens, use_cache=False).logits
    return device.compiled(sum_losses)(logits, tokens) * share


def sum_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the sum of the losses of all predicted tokens."""
    # The last token predicts nothing (-100): to cut its logits off would be to copy all others.
    targets = pad(tokens[:, 1:], (0, 1), value=-100)
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def muon_and_adamw(
    plan: JobPlan, settings: Settings, named: Mapping[str, nn.Parameter]
) -> list[Optimizer]:
    """Make Muon for the matrices of the layers, and AdamW for embeddings, norms and biases."""
    inside = {name: each for name, each in named.items() if ".h." in name and each.ndim == 2}
    rest = {name: each for name, each in named.items() if name not in inside}
    decay = settings.weight_decay
    return [
        Muon(
            inside.values(),
            lr=settings.lr,
            weight_decay=decay,
            dtype=torch.float32 if plan.precision == "fp32" else torch.bfloat16,
        ),
        AdamW(
            decay_matrices(rest, decay),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        ),
    ]


def open_split(plan: JobPlan, split: str) -> Text:
    """Open a split of the text to train on: the job's own unless the plan names one."""
    return open_text(
        plan.data or Path(__file__).with_name("text.txt"),
        split=split,
        seq_len=plan.seq_len,
        seed=plan.seed,
        vocab_size=plan.model["vocab_size"],
    )


def make_model(plan: JobPlan, settings: Settings, device: Device) -> GPT2LMHeadModel:
    """Make a GPT-2: a saved one, or a new one, which the seed makes the same on every worker."""
    config = GPT2Config(**plan.model)
    config._attn_implementation = choose_attention(config, device)
    if config.activation_function == "gelu_new" and device.torch_device.type != "xla":
        # The same function, written as one operation of PyTorch and not as eight. XLA joins those.
        config.activation_function = "gelu_pytorch_tanh"
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
    device.compile_layers(model)
    return model


def choose_attention(config: GPT2Config, device: Device) -> str:
    """Use PyTorch's fused attention if there is one that does what the config asks for."""
    # GPT-2 masks what comes later by itself. transformers would still make a mask in every call,
    # to separate packed samples (there are none), and add it to all scores.
    for attention in ("eager", "sdpa"):
        AttentionMaskInterface.register(attention, lambda **_: None)
    special = config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn
    fused = device.torch_device.type != "xla" and config.scale_attn_weights and not special
    return "sdpa" if fused else "eager"


if __name__ == "__main__":
    run_job(main)
