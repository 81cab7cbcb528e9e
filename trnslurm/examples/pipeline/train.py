"""Learn the line on all workers. A restart continues from the newest checkpoint."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import trnslurm

STEPS, BATCH = 60, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("saves", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    points, labels = torch.load(options.data / "train.pt", weights_only=True)
    done, weights = 0, torch.zeros(3)
    if options.resume:
        done, weights = torch.load(options.resume, weights_only=True)
    weights.requires_grad_()
    for step in range(done + 1, STEPS + 1):
        first = step * BATCH % len(points)
        mine = slice(first + rank, first + BATCH, workers)
        outputs = points[mine] @ weights[:2] + weights[2]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels[mine])
        (gradient,) = torch.autograd.grad(loss, weights)
        dist.all_reduce(gradient)
        dist.all_reduce(loss := loss.detach())
        with torch.no_grad():
            weights -= gradient / workers
        trnslurm.report(step=step, steps=STEPS, loss=loss.item() / workers)
        if step % 20 == 0 and rank == 0:
            file = options.saves / f"step-{step:08d}.pt"
            torch.save((step, weights.detach()), file)
            trnslurm.saved(step, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
