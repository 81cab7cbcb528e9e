"""How many steps a run has, what is due at each step, and the learning rate."""

import math
import time

from trnslurm.train.loop.progress import STEADY_AFTER
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings

# One step more than it takes to see every graph, so that a late graph shows in the precompile.
PRECOMPILE_STEPS = STEADY_AFTER + 1


def total_steps(plan: JobPlan, *, epochs: int, samples_per_epoch: int) -> tuple[int, int]:
    """Return the total number of steps, and the number of epochs that they begin.

    The steps are the plan's, or fewer if the epochs end sooner. With 0 epochs only the steps count.
    """
    global_batch = plan.batch.global_batch
    if epochs and (steps := -(-epochs * samples_per_epoch // global_batch)) < plan.steps:
        return steps, epochs
    return plan.steps, -(-plan.steps * global_batch // max(1, samples_per_epoch))


def due(every: int, step: int, also: tuple[int, ...]) -> bool:
    """Return whether an action is due: every N steps (0: never), and also at some steps."""
    return every > 0 and (step % every == 0 or step in also)


class SaveTimes:
    """When a checkpoint is due: after a number of steps, after some minutes, and at the end.

    Worker 0's clock counts the minutes since the last checkpoint. 0 minutes disables this.
    """

    def __init__(self, settings: CommonSettings, *, last: int) -> None:
        self._every = settings.save_every
        self._seconds = 60 * settings.save_minutes
        self._last = last
        self._since = time.monotonic()

    def overdue(self) -> bool:
        """Return whether the minutes have passed by this worker's clock."""
        return self._seconds > 0 and time.monotonic() - self._since >= self._seconds

    def due(self, step: int, *, overdue: bool) -> bool:
        """Return whether a checkpoint is due now; `overdue` is worker 0's flag."""
        at_end = self._seconds > 0 and step == self._last
        if not (overdue or at_end or due(self._every, step, also=(self._last,))):
            return False
        self._since = time.monotonic()
        return True


def learning_rate(settings: CommonSettings, *, step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then the schedule's decay to 0.

    The first step has lr / warmup_steps. With a rate of 0 it would compute a batch for nothing.
    """
    name, peak, warmup_steps = settings.schedule, settings.lr, settings.warmup_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, steps - warmup_steps)
    if name == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (1.0 - progress) if name == "linear" else peak
