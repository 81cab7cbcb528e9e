"""An Accelerate training loop with trnslurm's three calls: report, should_stop, saved.

    trnslurm submit ./train.py --nodes 2 -- --out {checkpoints} --resume {resume}

With these calls, status and metrics show the steps, a stop saves a checkpoint, and the script can
continue in the middle of an epoch.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import trnslurm

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4, help="batch size per worker")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--resume")
options = parser.parse_args()

torch.manual_seed(1)
rows = torch.randn(64, 8)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.Adam(model.parameters(), lr=0.05), DataLoader(data, options.batch_size)
)

per_epoch = len(loader) // options.accumulate
steps, step = per_epoch * options.epochs, 0
if options.resume:
    accelerator.load_state(options.resume)
    step = int(options.resume.rpartition("-")[2])
stops = False
while step < steps and not stops:
    batches = (step % per_epoch) * options.accumulate
    for batch, targets in accelerator.skip_first_batches(loader, batches):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        trnslurm.report(step=step, steps=steps, loss=loss.item())
        stops = trnslurm.should_stop()
        if stops or step % per_epoch == 0:
            path = options.out / f"step-{step}"
            accelerator.save_state(path)
            trnslurm.saved(step, path)
        if stops:
            break
