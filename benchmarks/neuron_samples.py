"""Training loops as AWS's samples for Trainium have them, with a job's model.

They do what the samples do in a step, at the commits below, in code of our own; data loading,
logging and checkpoints are left out, and the batches are random. Where the samples call
xm.mark_step, torch_xla 2.9 says torch_xla.sync.

- bert_pretrain, "sample": data parallelism by xm.reduce_gradients. Its script for Slurm sets
  BUCKET_CAP_MB=512, which torch_xla has not read since 2.5; on Neuron it sets
  ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=50 unless it is set.
  https://github.com/aws-neuron/aws-neuron-samples, torch-neuronx/training/dp_bert_hf_pretrain:
  dp_bert_large_hf_pretrain_hdf5.py (001189f), run_dp_bert_large_hf_pretrain_bf16_s128.sh (3658f9f)
- gpt2_zero1, "sample": ZeroRedundancyOptimizer without buckets; its script asks the compiler to
  join collectives up to 62 MB where it trains in mixed precision.
  The same repository, zero1_gpt2: run_clm_no_trainer.py and run_clm.sh at 0012643
- gpt2_zero1, "NxD": the same with the buckets of neuronx-distributed, which notes NaN above 140 MB.
  https://github.com/aws-neuron/neuronx-distributed, src/neuronx_distributed/trainer/trainer.py
- llama3_clm, "sample": XlaFullyShardedDataParallel with the settings of the sample for GPT-2, which
  takes the norm of the parameters in each micro-batch.
  aws-neuron-samples, fsdp_gpt2: run_clm_no_trainer.py at 5d7a643
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from xla_workers import WARM_UP, WINDOW

BUCKET_MB = 50
"""torch_xla's default on Neuron (its _internal/neuron.py)."""
NXD_BUCKET_MB = 130


def train(way: str, job: Any, step_done: Callable[[int], None]) -> None:
    """Train a job's model as a sample does."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as loader

    from trnslurm.train.loop.job import open_job
    from trnslurm.train.loop.progress import count_parameters

    opened = open_job(job.Settings, "Train as a sample does.", model=job.Model)
    plan, settings, device = opened.plan, opened.settings, opened.device
    world, accumulation = device.world, plan.batch.accumulation
    os.environ["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = str(BUCKET_MB)
    fsdp = plan.recipe == "llama3_clm"
    if fsdp:
        config = job.LlamaConfig(**plan.model)
        config._attn_implementation = "eager"
        model: Any = wrap(job.LlamaForCausalLM(config))
    else:
        model = job.make_model(plan, settings, device)
    print(f"{count_parameters(model):,} parameters")
    model.train()
    optimizer, zero1 = make_optimizer(way, plan.recipe, model.named_parameters())
    rate = functools.partial(torch.optim.lr_scheduler.LambdaLR, optimizer)
    schedule = rate(lambda step: min(1.0, (step + 1) / 75))
    batches = [make_batch(plan, settings) for _ in range((WARM_UP + WINDOW) * accumulation)]
    running = torch.zeros(1, device=device.torch_device)
    for number, batch in enumerate(loader.MpDeviceLoader(batches, device.torch_device), 1):
        norm = norm_of(model, (each.detach() for each in model.parameters())) if fsdp else None
        loss = model(**batch).loss / accumulation
        running += loss.detach()
        loss.backward()
        if number % accumulation:
            continue
        torch_xla.sync()
        [reduced] = xm.all_reduce(xm.REDUCE_SUM, [running / world])
        running.zero_()
        gradient_norm = None
        if fsdp:
            gradient_norm = norm_of(model, (each.grad for each in model.parameters()))
            model.clip_grad_norm_(1.0)
        elif not zero1:
            xm.reduce_gradients(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # The samples do so in a closure of the next sync.
        torch_xla.sync()
        for told in (reduced, norm, gradient_norm):
            if told is not None:
                told.cpu().item()
        step_done(number // accumulation)


def update(way: str, recipe: str, named: dict[str, Any]) -> None:
    """Trace the collectives of a sample's update of parameters, from gradients of zero."""
    import torch
    import torch_xla.core.xla_model as xm

    os.environ["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = str(BUCKET_MB)
    optimizer, zero1 = make_optimizer(way, recipe, named.items())
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    xm.all_reduce(xm.REDUCE_SUM, [torch.zeros(1, device=parameter.device)])
    if not zero1:
        xm.reduce_gradients(optimizer)
    else:
        optimizer.step()


def wrap(model: Any) -> Any:
    """Divide a Llama as the sample divides its GPT-2."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    fsdp: Any = XlaFullyShardedDataParallel
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    return fsdp(
        model,
        flatten_parameters=False,
        shard_param_on_dim_0=True,
        optimization_barrier_in_forward=True,
        optimization_barrier_in_backward=True,
        reshard_after_forward=True,
        disable_reshard_on_root=False,
        coalesce_all_gather_ops=False,
        auto_wrap_policy=policy,
    )


def make_optimizer(way: str, recipe: str, parameters: Any) -> tuple[Any, bool]:
    """Make the sample's optimizer, and tell whether it is ZeRO-1."""
    import torch

    plain = ("bias", "LayerNorm", "layer_norm.weight")
    named = list(parameters)
    groups = [
        {"params": [p for name, p in named if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [p for name, p in named if name.endswith(plain)], "weight_decay": 0.0},
    ]
    if recipe != "gpt2_zero1":
        return torch.optim.AdamW(groups, lr=1e-4), False
    return make_zero1(way, groups, int(os.environ["WORLD_SIZE"])), True


def make_zero1(way: str, groups: list[dict[str, Any]], world: int) -> Any:
    """Make torch_xla's optimizer with the arguments of the sample, or of neuronx-distributed."""
    import torch
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    buckets = {
        "bucket_cap_mb_all_gather": max(1, NXD_BUCKET_MB // world),
        "bucket_cap_mb_reduce_scatter": NXD_BUCKET_MB,
    }
    zero: Any = ZeroRedundancyOptimizer
    return zero(
        groups,
        torch.optim.AdamW,
        lr=1e-4,
        grad_clipping=True,
        max_norm=1.0,
        pin_layout=False,
        **buckets if way == "NxD" else {},
    )


def norm_of(model: Any, tensors: Any) -> Any:
    """Return the sample's norm of tensors that are divided over the workers."""
    import torch
    import torch_xla.core.xla_model as xm

    total = torch.zeros(1).to(next(model.parameters()).device)
    for tensor in tensors:
        total += torch.norm(tensor, 2.0) ** 2.0
    return model.all_reduce_op(xm.REDUCE_SUM, total) ** 0.5


def make_batch(plan: Any, settings: Any) -> dict[str, Any]:
    """Make a random micro-batch of the sample's tensors."""
    import torch

    shape = (plan.batch.micro_batch, plan.seq_len)
    ids = torch.randint(plan.model["vocab_size"], shape)
    if plan.recipe != "bert_pretrain":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    masked = torch.rand(shape) < settings.max_pred / plan.seq_len
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "labels": ids.where(masked, torch.tensor(-100)),
        "next_sentence_label": torch.randint(2, shape[:1]),
    }
