"""Evolution strategies on Ray: a learner, and an evaluator for every worker of the plan.

    trnslurm submit ./train.py --nodes 2 --launcher ray -- \
        --workers {workers} --out {checkpoints} --resume {resume}

The evaluators try random changes to a small network. The learner, which the launcher starts on node
0, adopts the changes that help. A seed identifies a change, so only seeds and losses are sent.
"""

import argparse
from pathlib import Path

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import trnslurm

HIDDEN, TRIES, SIZE, LR = 16, 32, 0.05, 0.02


def change(seed: int) -> torch.Tensor:
    return torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(seed))


@ray.remote
class Evaluator:
    def __init__(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.x = torch.linspace(-3, 3, 64, device=device)[:, None]

    def losses(self, weights: torch.Tensor, seeds: range) -> dict[int, float]:
        return {seed: self.loss(weights + SIZE * change(seed)) for seed in seeds}

    def loss(self, weights: torch.Tensor) -> float:
        slope, shift, out = weights.to(self.x.device).view(3, HIDDEN)
        return ((self.x * slope + shift).tanh() @ out - self.x[:, 0].sin()).square().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    ray.init()
    gpus = int(torch.cuda.is_available())
    group = placement_group([{"CPU": 1, "GPU": gpus}] * options.workers, strategy="SPREAD")
    ray.get(group.ready())  # when all nodes have joined
    placed = Evaluator.options(
        num_cpus=1, num_gpus=gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group)
    )
    evaluators = [placed.remote() for _ in range(options.workers)]

    done, weights = 0, change(0)
    if options.resume:
        done, weights = torch.load(options.resume, weights_only=True)
    for step in range(done + 1, options.steps + 1):
        seeds = range(step * TRIES, (step + 1) * TRIES)
        parts = [
            evaluator.losses.remote(weights, seeds[number :: options.workers])
            for number, evaluator in enumerate(evaluators)
        ]
        losses = {seed: loss for part in ray.get(parts) for seed, loss in part.items()}
        mean = sum(losses[seed] for seed in seeds) / TRIES
        weights -= LR / SIZE * sum((losses[s] - mean) * change(s) for s in seeds) / TRIES
        trnslurm.report(step=step, steps=options.steps, loss=mean)
        stops = trnslurm.should_stop()
        if stops or step % 10 == 0 or step == options.steps:
            path = options.out / f"{step}.pt"
            torch.save((step, weights), path)
            trnslurm.saved(step, path)
        if stops:
            break


if __name__ == "__main__":
    main()
