"""Which units (canonical micro-batches) of a step a worker runs, and what each counts.

The gradient of a step is the mean over the step's tokens, for any number of workers. So a unit sums
the losses of its tokens, and multiplies the sum by its share: 1 / the tokens of the whole step.
From there on, gradients are only added: the backward passes add up units, the optimizers add up
workers. Nothing is averaged, because a mean of means weighs tokens differently if units or workers
have different numbers of them. Some libraries (torch_xla's ZeRO-1, FSDP, DeepSpeed) divide by the
number of workers or units; the calls to them multiply by it again.

Each term of a loss has its own share: masked tokens count among the step's masked tokens, pairs of
sentences among its pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trnslurm.samples.batches import deal
from trnslurm.samples.order import derive_seed
from trnslurm.train.plan import JobPlan


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One micro-batch of one step; its samples and randomness do not depend on the worker."""

    index: int
    first: int
    """Position of its first sample in the endless stream of samples."""
    size: int
    weight: float
    """1, or 0 for padding."""
    seed: int
    """The random seed of the unit's dropout and masking."""

    def share_of(self, *counts: float) -> Tensor:
        """Return the factors that turn sums over this unit into shares of means over the step.

        `counts` are the numbers of tokens (samples, …) of the whole step, one for each term. Give
        the factors to the device with the samples. They are a vector, because torch_xla compiles a
        plain number of exactly 0 or 1 into the graph.
        """
        return torch.tensor([self.weight / count if count else 0.0 for count in counts])


def worker_units(plan: JobPlan, *, worker: int, step: int) -> list[Unit]:
    """Return the units that a worker runs in a step (counted from 1), in order.

    Units are dealt out like cards to groups of workers, usually of one worker each. When none are
    left, a group repeats one with weight 0: every worker runs the same graph equally often, and a
    valid repeated unit cannot bring in NaN x 0.
    """
    batch, steps_before = plan.batch, step - 1
    return [
        Unit(
            index=index,
            first=steps_before * batch.global_batch + index * batch.micro_batch,
            size=batch.micro_batch,
            weight=1.0 if counts else 0.0,
            seed=derive_seed(plan.seed, steps_before, index),
        )
        for index, counts in _dealt(plan, worker, batch.units)
    ]


def eval_units(plan: JobPlan, *, worker: int, samples: int) -> list[Unit]:
    """Return this worker's units of a held-out text; all workers together see `samples`.

    They are dealt out and padded like a step's units.
    """
    size = plan.batch.micro_batch
    return [
        Unit(index=index, first=index * size, size=size, weight=1.0 if counts else 0.0, seed=0)
        for index, counts in _dealt(plan, worker, -(-samples // size))
    ]


def _dealt(plan: JobPlan, worker: int, count: int) -> list[tuple[int, bool]]:
    groups = plan.batch.groups
    return deal(count, worker * groups // plan.workers, groups, -(-count // groups))
