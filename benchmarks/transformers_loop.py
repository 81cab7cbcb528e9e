"""What gpu_training.py races against: a plain loop with PyTorch and a model of transformers.

It reads the plan of jobs/gpt2_zero1 or jobs/llama3_clm, begins with the same weights and gets the
same samples in the same order; they are made beforehand, at no cost to the loop.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trnslurm.train.data.text import open_text
from trnslurm.train.loop.progress import flops_per_sample
from trnslurm.train.sharded.strategy import shapes_of
from trnslurm.train.sharded.values import new_values

parser = argparse.ArgumentParser(description="Train GPT-2 or Llama with transformers.")
parser.add_argument("plan", type=Path)
parser.add_argument("text", type=Path)
parser.add_argument("metrics", type=Path, help="gets a line of JSON for every report")
arguments = parser.parse_args()
plan = json.loads(arguments.plan.read_text())
batch, train = plan["batch"], plan["train"]
device = torch.device(plan["device"])

text = open_text(arguments.text, seq_len=plan["seq_len"], seed=plan["seed"])
samples = text.samples(0, plan["steps"] * batch["global_batch"])
micro_batches = iter(samples.split(batch["micro_batch"]))

torch.manual_seed(plan["seed"])
if plan["recipe"] == "gpt2_zero1":
    model = GPT2LMHeadModel(GPT2Config(**plan["model"], attn_implementation="sdpa")).to(device)
else:
    with device:
        model = LlamaForCausalLM(LlamaConfig(**plan["model"], attn_implementation="sdpa"))
    first = new_values(shapes_of(model), seed=plan["seed"], std=model.config.initializer_range)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first(name, "parameter", range(parameter.shape[0])))
groups = [
    {
        "params": [p for p in model.parameters() if p.dim() > 1],
        "weight_decay": train["weight_decay"],
    },
    {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
]
betas = (train["beta1"], train["beta2"])
optimizer = AdamW(groups, lr=train["lr"], betas=betas, eps=train["eps"], fused=True)
flops_per_token = flops_per_sample(model, model.config, plan["seq_len"]) / plan["seq_len"]

# Go!
model.train()
with arguments.metrics.open("w") as metrics:
    for step in range(1, plan["steps"] + 1):
        total_loss = torch.zeros((), device=device)
        for _ in range(batch["accumulation"]):
            tokens = next(micro_batches).to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / batch["accumulation"]).backward()
            total_loss += loss.detach() / batch["accumulation"]
        torch.nn.utils.clip_grad_norm_(model.parameters(), train["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        if step % train["log_every"] == 0:
            line = {"step": step, "loss": total_loss.item(), "time": time.time()}
            line["flops_per_token"] = flops_per_token
            if device.type == "cuda":
                line["device_memory_mb"] = torch.cuda.max_memory_allocated() / 1e6
            metrics.write(json.dumps(line) + "\n")
