"""What training.py races against: a plain loop with transformers and accelerate, on CPUs.

Written after transformers' example run_clm_no_trainer.py. It reads the plan of jobs/gpt2_zero1 and
gets the same samples in the same order; they are made beforehand, at no cost to the loop.
"""

import argparse
import json
import time
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    default_data_collator,
    get_scheduler,
)

from trnslurm.train.data.text import open_text

NO_DECAY = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")

parser = argparse.ArgumentParser(description="Train GPT-2 with accelerate.")
parser.add_argument("plan", type=Path)
parser.add_argument("text", type=Path)
parser.add_argument("metrics", type=Path, help="gets a line of JSON for every report")
arguments = parser.parse_args()
plan = json.loads(arguments.plan.read_text())
batch, train = plan["batch"], plan["train"]

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=batch["accumulation"])
set_seed(plan["seed"])

text = open_text(arguments.text, seq_len=plan["seq_len"], seed=plan["seed"])
samples = text.samples(0, plan["steps"] * batch["global_batch"])
dataset = [{"input_ids": row, "labels": row} for row in samples]
dataloader = DataLoader(dataset, batch_size=batch["micro_batch"], collate_fn=default_data_collator)

model = AutoModelForCausalLM.from_config(GPT2Config(**plan["model"]))
named = list(model.named_parameters())
groups = [
    {
        "params": [p for name, p in named if not name.endswith(NO_DECAY)],
        "weight_decay": train["weight_decay"],
    },
    {"params": [p for name, p in named if name.endswith(NO_DECAY)], "weight_decay": 0.0},
]
betas = (train["beta1"], train["beta2"])
optimizer = AdamW(groups, lr=train["lr"], betas=betas, eps=train["eps"])
lr_scheduler = get_scheduler(train["schedule"], optimizer)
model, optimizer, dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, dataloader, lr_scheduler
)

# Go!
model.train()
step, total_loss = 0, 0.0
with arguments.metrics.open("w") as metrics:
    for examples in dataloader:
        with accelerator.accumulate(model):
            loss = model(**examples).loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), train["max_norm"])
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % train["log_every"] == 0:
            mean = accelerator.reduce(total_loss, "mean").item()
            mean /= train["log_every"] * batch["accumulation"]
            total_loss = 0.0
            if accelerator.is_main_process:
                line = {"step": step, "loss": mean, "time": time.time()}
                metrics.write(json.dumps(line) + "\n")
accelerator.end_training()
