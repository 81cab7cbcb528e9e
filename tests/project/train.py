"""A training as its users write them: DistributedDataParallel and argparse, no word of trnslurm."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from widths import width


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", default="out")
    parser.add_argument("--config", default="configs/base.yaml")
    options = parser.parse_args()
    lr = yaml.safe_load(Path(options.config).read_text())["lr"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(width(), 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(1, options.steps + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(world, options.accum, options.batch_size, width(), generator=generator)
        for micro in x[rank]:
            loss = (model(micro) - micro.sum(1, keepdim=True)).pow(2).mean() / options.accum
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"{world} workers, {options.batch_size} x {options.accum}, loss {loss.item():.4f}")
        Path(options.out).mkdir(exist_ok=True)
        torch.save(model.module.state_dict(), f"{options.out}/last.pt")
    dist.destroy_process_group()


main()
