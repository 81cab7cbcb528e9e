"""gpt2_zero1's job, in which a worker's gradients are wrong from a step on.

WRONG is "RANK STEP HOW": always flips one bit; random flips another one each time; all makes every
worker's gradients differ each time, as kernels do that add up in no fixed order.
"""

import os
import random
import runpy

import torch

from trnslurm.train.loop.run import TrainingRun

rank, step, how = os.environ["WRONG"].split()
add, units = TrainingRun.add, TrainingRun.units
now = 0
chance = random.Random(os.getpid())


def note_units(run, number):
    global now
    now = number
    return units(run, number)


@torch.no_grad()
def add_wrong(run, share):
    if now >= int(step) and (how == "all" or run.device.rank == int(rank)):
        gradient = run.optimizer.own_gradients()[0]
        place = 7 if how == "always" else chance.randrange(len(gradient))
        gradient.view(torch.int32)[place] ^= 1
    add(run, share)


TrainingRun.add, TrainingRun.units = add_wrong, note_units
runpy.run_path(os.environ["JOB"], run_name="__main__")
