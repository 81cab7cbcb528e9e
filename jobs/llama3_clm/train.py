"""Train Llama 3 on text, sharded over workers. In a run directory, on each node:

    python -m torch.distributed.run --nproc_per_node 2 code/jobs/llama3_clm/train.py plan.json

plan.json has all settings, except for those that are specific to a strategy: these are in
strategy.json. TRNSLURM_PHASE=precompile runs only three steps, to compile every graph.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import is_flash_attn_2_available

from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, transformer_flops
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.models import Llama
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import Free, Positive
from trnslurm.train.sharded.make import shard_model
from trnslurm.train.sharded.settings import ShardedSettings
from trnslurm.train.sharded.strategy import Sharded

try:
    from transformers.initialization import no_init_weights
except ImportError:  # before transformers 5
    from transformers.modeling_utils import no_init_weights

RATES = {"tokens/s": "tokens_per_s", "per device": "tokens_per_s_per_device"}


@dataclass(frozen=True, kw_only=True)
class Settings(ShardedSettings):
    """The recipe's train section."""

    eval_samples: Free[Positive[int]]
    """The number of held-out samples."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"]
    """auto: sdpa, or eager on XLA devices; flash_attention_2 needs the package flash-attn."""

    REFUSED = (
        (
            {
                "attention": "flash_attention_2",
                "device": "not on GPUs",
            },
            "it needs a GPU: set train.attention=auto",
        ),
        (
            {"attention": "flash_attention_2", "precision": ["fp32", "mixed"]},
            "it computes in bf16: set precision=bf16, or train.attention=auto",
        ),
    )


class Model(Llama):
    """The recipe's model section."""

    REFUSED = (
        (
            {"tie_word_embeddings": True},
            "a sharded model cannot share a parameter between two layers: set it to false",
        ),
    )


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Train Llama 3 on text, sharded over all workers.", model=Model)
    plan, settings, device = job.plan, job.settings, job.device
    text = open_split(plan, "train")
    held_out = open_split(plan, "eval") if settings.eval_every else text
    config = LlamaConfig(**plan.model)
    config._attn_implementation = choose_attention(settings.attention, device)
    # The model and its optimizer; every worker has a part of both.
    sharded = shard_model(
        plan,
        settings,
        device,
        job.environment.run_dir,
        lambda: make_model(config),
        std=config.initializer_range,
    )
    model = sharded.model
    run = TrainingRun(
        job,
        sharded,
        data=text.fingerprint,
        samples_per_epoch=text.num_blocks,
        reporting=Reporting(
            flops_per_sample=transformer_flops(sharded.num_parameters, config, plan.seq_len),
            rates=RATES,
        ),
    )
    run.describe(
        sharded.num_parameters,
        shards=f"{settings.strategy}, attention {config._attn_implementation}",
        data=f"{text.num_tokens:,} tokens in {text.num_blocks:,} blocks of {plan.seq_len}",
        each=f"{plan.batch.global_batch * plan.seq_len:,} tokens",
    )
    # Packed text has no padding: every token of a sample but the first is predicted.
    predicted = plan.seq_len - 1

    def evaluate() -> dict[str, float]:
        tokens = settings.eval_samples * predicted
        [loss] = run.evaluate(
            model,
            lambda unit: unit_loss(sharded, device, held_out, unit, tokens),
            samples=settings.eval_samples,
        )
        return {"eval_loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    @torch.no_grad()
    def same_loss() -> list[Tensor]:
        # Of one unit, which every worker computes with the parameters that it gathers.
        model.eval()
        size = plan.batch.micro_batch
        unit = Unit(index=0, first=0, size=size, weight=1.0, seed=0)
        loss = unit_loss(sharded, device, text, unit, size * predicted)
        device.sync()
        return [loss]

    # Go! Every unit is a separate graph, and so is the end of a step.
    tokens = plan.batch.global_batch * predicted
    model.train()
    for step in run.steps():
        for unit in run.units(step):
            loss = unit_loss(sharded, device, text, unit, tokens)
            sharded.backward(loss)
            run.add(loss)
        run.end(step, sharded.step(run.lr(step)), evaluate=evaluate)
    run.close(same_loss, what="gathered parameters")


def unit_loss(
    sharded: Sharded, device: Device, text: Text, unit: Unit, valid_tokens: int
) -> Tensor:
    """Return a unit's share of the mean loss over `valid_tokens` tokens."""
    with device.timer("data"):
        share = unit.share_of(valid_tokens)
        tokens, share = device.put_all([text.samples(unit.first, unit.size), share])
    device.seed(unit.seed)
    logits = sharded.model(tokens, use_cache=False).logits
    # The last token predicts nothing (-100): to cut its logits off would be to copy all others.
    targets = pad(tokens[:, 1:], (0, 1), value=-100)
    return sharded.cross_entropy(logits, targets) * share


def open_split(plan: JobPlan, split: str) -> Text:
    """Open a split of the text to train on: the job's own unless the plan names one."""
    return open_text(
        plan.data or Path(__file__).with_name("text.txt"),
        split=split,
        seq_len=plan.seq_len,
        seed=plan.seed,
        vocab_size=plan.model["vocab_size"],
    )


def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    """Make a Llama on the device that PyTorch uses now; the parameters' values are set later."""
    with no_init_weights():
        model = LlamaForCausalLM(config)
    # The frequencies of positions are the only values that nothing brings later. As a plain tensor
    # and no buffer they stay: those a strategy moves to no memory, or rounds to bf16 (torch_xla's
    # buffer_dtype), in which positions above some hundreds would not be what they are.
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    frequencies = rotary.inv_freq
    del rotary.inv_freq
    rotary.inv_freq = frequencies
    model.model.rotary_emb = rotary
    return model


def choose_attention(name: str, device: Device) -> str:
    """Return the attention that the settings name; for auto, the fastest one on the device."""
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise TrainError(
            "train.attention: flash_attention_2 needs a GPU and the package flash-attn in the "
            "nodes' Python: install it, or set train.attention=auto"
        )
    if name == "auto":
        return "eager" if device.torch_device.type == "xla" else "sdpa"
    return name


if __name__ == "__main__":
    run_job(main)
