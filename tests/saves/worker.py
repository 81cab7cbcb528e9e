"""A training that saves and loads its whole state, in several forms of parallelism.

    worker.py FORM STEPS CHECKPOINTS [last step to do]

What it has loaded is saved again beside it, to be compared. Worker 0 prints a line of JSON: the
first step, and the losses of all steps.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import trnslurm

DATA = torch.randn(40, 10, generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 7)  # no number of workers divides its rows but 7
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def parallel(form, model):
    """Return the model as its form of parallelism has it, and the data-parallel place."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if form == "ddp":
        return DistributedDataParallel(model), rank, world
    if form == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.up, mesh=mesh)
        return fully_shard(model, mesh=mesh), rank, world
    if form == "hybrid":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
        return fully_shard(model, mesh=mesh), rank, world
    if form == "tensor":
        mesh = init_device_mesh("cpu", (world,))
        plan = {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, plan), 0, 1
    return model, rank, world


def main():
    form, steps, checkpoints = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    end = int(sys.argv[4]) if len(sys.argv) > 4 else steps
    if form != "plain":
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model, rank, world = parallel(form, Net())
    bare = model.module if form == "ddp" else model
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}], lr=0.01
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    totals = {"samples": 0, "best": (9.0, -1), "losses": {}}
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "totals": totals}
    own = {"rank": rank, "random": torch.get_rng_state()}
    first = trnslurm.load(state, each_worker=own, directory=checkpoints)
    if first:
        trnslurm.save(first, state, directory=f"{checkpoints}-{first}-again", wait=True)
    batches = trnslurm.batches(
        len(DATA), global_batch=8, steps=steps, start=first, rank=rank, world_size=world
    )
    for step in batches:
        total = torch.zeros(())
        for micro in step.micro_batches:
            x = DATA[micro.indices]
            loss = (model(x) - x).square().mean() * micro.weight
            (loss * world).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bare.seen += 1
        if world > 1:
            dist.all_reduce(total)
        totals["losses"][step.number] = float(total)
        totals["samples"] += step.samples
        totals["best"] = min(totals["best"], (float(total), step.number))
        trnslurm.save(step.number, state, each_worker=own, directory=checkpoints)
        if step.number == end:
            break
    if rank == 0:
        told = {"first": first, **totals, "seen": int(bare.seen), "own": own["rank"]}
        told["sharded"] = sum(isinstance(p, DTensor) for p in model.parameters())
        print(json.dumps(told), flush=True)
    if form != "plain":
        dist.destroy_process_group()


main()
