"""A model sharded by FSDP2, with exact batches and checkpoints for any number of workers.

    trnslurm submit ./train.py --nodes 2 -- --epochs 3
    torchrun --nproc_per_node 2 train.py    # without trnslurm: checkpoints go to ./checkpoints

The samples of each step are the same on any number of workers, and so is the loss except for
rounding.
A run can continue on another number of workers: trnslurm resume last --nodes 3.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trnslurm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples per step, over all workers")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    world = dist.get_world_size()

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1)).to(device)
    mesh = init_device_mesh(kind, (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    state = {"model": model, "optimizer": optimizer}
    done = trnslurm.load(state)
    rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
    targets = rows.square().mean(1, keepdim=True)
    steps = trnslurm.batches(
        len(rows), global_batch=options.batch, micro_batch=options.micro_batch,
        epochs=options.epochs, seed=1, start=done,
    )  # fmt: skip
    for step in steps:
        total = torch.zeros((), device=device)
        for micro in step.micro_batches:
            model.set_requires_gradient_sync(micro.last)
            x, y = rows[micro.indices].to(device), targets[micro.indices].to(device)
            loss = nn.functional.mse_loss(model(x), y) * micro.weight
            (loss * world).backward()  # FSDP2 divides gradients by the number of workers
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        trnslurm.report(step=step.number, steps=steps.steps, loss=total.item())
        stops = trnslurm.should_stop()
        if stops or step.number % options.save_every == 0 or step.number == steps.steps:
            trnslurm.save(step.number, state)
        if stops:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
