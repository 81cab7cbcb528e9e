"""How many optimizer steps a training has, and the learning rate of each."""

import math

from trnslurm.train.errors import TrainError
from trnslurm.train.plan import Plan

SCHEDULES = ("cosine", "linear", "constant")


def total_steps(plan: Plan, *, epochs: int, samples_per_epoch: int) -> int:
    """Give the steps of the whole training: the plan's, or fewer if so many epochs are over."""
    if not epochs:
        return plan.steps
    return min(plan.steps, -(-epochs * samples_per_epoch // plan.batch.global_batch))


def learning_rate(name: str, *, peak: float, warmup_steps: int, step: int, steps: int) -> float:
    """Give the rate of a step (counted from 0): linear warm-up, then the named decay to 0.

    The first step has peak / warmup_steps and not 0, which would compute a batch for nothing.
    """
    if name not in SCHEDULES:
        raise TrainError(f"train.schedule: {name!r} is not one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if name == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (1.0 - progress) if name == "linear" else peak
