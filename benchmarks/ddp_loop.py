"""What training.py races against as well: a GPT-2 of one's own with DistributedDataParallel.

In the manner of nanoGPT: a short model with fused attention, gradients summed in the last
micro-batch of a step only, AdamW. It reads the plan of jobs/gpt2_zero1, begins with the same
weights and gets the same samples in the same order; they are made beforehand.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.data.text import open_text


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        count, length, width = x.shape
        query, key, value = (
            each.view(count, length, self.heads, -1).transpose(1, 2)
            for each in self.attention(self.ln_1(x)).split(width, dim=2)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 without dropout."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width = config.n_embd
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.n_positions, width)
        self.blocks = nn.ModuleList(Block(width, config.n_head) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T

    @torch.no_grad()
    def begin_like(self, other: GPT2LMHeadModel) -> None:
        """Take the weights of transformers' model, whose matrices lie the other way."""
        body = other.transformer
        pairs = [(self.tokens, body.wte), (self.positions, body.wpe), (self.norm, body.ln_f)]
        for own, block in zip(self.blocks, body.h, strict=True):
            pairs += [(own.ln_1, block.ln_1), (own.ln_2, block.ln_2)]
            pairs += [(own.attention, block.attn.c_attn), (own.joined, block.attn.c_proj)]
            pairs += [(own.up, block.mlp.c_fc), (own.down, block.mlp.c_proj)]
        for own, theirs in pairs:
            for name, parameter in own.named_parameters():
                value = getattr(theirs, name)
                parameter.copy_(value.T if isinstance(own, nn.Linear) else value)


parser = argparse.ArgumentParser(description="Train GPT-2 with DistributedDataParallel.")
parser.add_argument("plan", type=Path)
parser.add_argument("text", type=Path)
parser.add_argument("metrics", type=Path, help="gets a line of JSON for every report")
arguments = parser.parse_args()
plan = json.loads(arguments.plan.read_text())
batch, train = plan["batch"], plan["train"]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
text = open_text(arguments.text, seq_len=plan["seq_len"], seed=plan["seed"])
samples = text.samples(0, plan["steps"] * batch["global_batch"])
micro_batches = iter(samples.split(batch["micro_batch"])[rank::world])

config = GPT2Config(**plan["model"])
torch.manual_seed(plan["seed"])
first = GPT2LMHeadModel(config)
model = Gpt(config)
model.begin_like(first)
ddp = DistributedDataParallel(model)
groups = [
    {
        "params": [p for p in model.parameters() if p.dim() > 1],
        "weight_decay": train["weight_decay"],
    },
    {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
]
betas = (train["beta1"], train["beta2"])
optimizer = torch.optim.AdamW(groups, lr=train["lr"], betas=betas, eps=train["eps"])

# Go!
model.train()
total_loss = torch.zeros(())
with (arguments.metrics if rank == 0 else Path(os.devnull)).open("w") as metrics:
    for step in range(1, plan["steps"] + 1):
        for number in range(batch["accumulation"]):
            tokens = next(micro_batches)
            last = number == batch["accumulation"] - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                logits = ddp(tokens[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / batch["accumulation"]).backward()
            total_loss += loss.detach() / batch["accumulation"]
        nn.utils.clip_grad_norm_(model.parameters(), train["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        if step % train["log_every"] == 0:
            dist.all_reduce(total_loss)
            mean = total_loss.item() / world / train["log_every"]
            total_loss.zero_()
            metrics.write(json.dumps({"step": step, "loss": mean, "time": time.time()}) + "\n")
dist.destroy_process_group()
