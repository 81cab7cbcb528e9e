"""The same with the contract's lines: it reports, stops when asked, and resumes."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trnslurm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", type=int, help="the step after which to wait for a stop")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 1
    if options.resume:
        state = torch.load(options.resume, weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["step"] + 1
    samples = world * options.accum * options.batch_size
    for step in range(first, options.steps + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(samples, 8, generator=generator).double()
        mine = x[rank::world]
        total = torch.zeros((), dtype=torch.double)
        for micro in mine.split(options.batch_size):
            loss = (model(micro) - micro.sum(1, keepdim=True)).pow(2).mean() / options.accum
            loss.backward()
            total += loss.detach() / world
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        trnslurm.report(step=step, steps=options.steps, loss=total)
        stops = trnslurm.should_stop()
        while step == options.hold and not stops:
            stops = trnslurm.should_stop()
        if (stops or step % 10 == 0) and rank == 0:
            path = Path(options.out) / f"step-{step}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save({"model": model.module.state_dict(), "step": step}, path)
            trnslurm.saved(step, path)
        dist.barrier()
        if stops:
            break
        time.sleep(options.pause)
    dist.destroy_process_group()


main()
