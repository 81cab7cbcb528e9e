"""How many optimizer steps a training has, and what is due at each: also its learning rate."""

import math

from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.metrics import STEADY_AFTER
from trnslurm.train.plan import Plan

# One step more than it takes to see every graph, so that a late one shows here and not in training.
PRECOMPILE_STEPS = STEADY_AFTER + 1

SCHEDULES = ("cosine", "linear", "constant")


def total_steps(plan: Plan, *, epochs: int, samples_per_epoch: int) -> int:
    """Give the steps of the whole training: the plan's, or fewer if so many epochs are over."""
    if not epochs:
        return plan.steps
    return min(plan.steps, -(-epochs * samples_per_epoch // plan.batch.global_batch))


def steps_to_run(environment: Environment, *, done: int, stop_at: int, steps: int) -> range:
    """Give the steps that this start of a job runs, counted from 0; stop_at 0: to the end."""
    last = PRECOMPILE_STEPS if environment.phase == "precompile" else stop_at or steps
    return range(done, min(last, steps))


def due(every: int, step: int, also: tuple[int, ...]) -> bool:
    """Tell whether what happens every so many steps (0: never), and also at some, is due."""
    return every > 0 and (step % every == 0 or step in also)


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
