"""A worker that torchrun starts: it trains a very small model for real, with or without a fault.

    python -m torch.distributed.run --nproc_per_node 2 worker.py '{"device": "cpu", "steps": 3}'

It prints what tests ask for as lines of JSON.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from measures import cache_misses, optimizer_settings, state_bytes, use_cache
from torch import nn
from torch.nn.functional import cross_entropy

from trnslurm.saves.memory import HostCopy
from trnslurm.train.checkpoint.checkpoints import CheckpointPolicy, Checkpoints
from trnslurm.train.data.units import worker_units
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
from trnslurm.train.loop.job import run_job
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import load_plan


class Model(nn.Module):
    """Shapes that divide by no number of workers, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.down = nn.Linear(11, 5)
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, tokens):
        return self.head(self.down(self.norm(self.up(self.embed(tokens)))))


def main():
    options = json.loads(sys.argv[1])
    plan = load_plan(Path("plan.json"))
    environment = read_environment()
    if "cache" in options:
        use_cache(options["cache"], environment.rank)
    device = open_device(plan.device, environment)
    model, optimizer = make_model(plan, device)
    device.sync()
    checkpoints = Checkpoints(device, plan, environment, CheckpointPolicy())
    manifest = checkpoints.newest()
    if manifest:
        checkpoints.load(manifest, optimizer)
    first = manifest.step if manifest else 0
    if options.get("save_loaded"):
        save(checkpoints, optimizer, first)
    graphs = []
    for step in range(first + 1, options["steps"] + 1):
        before = device.graphs()
        train_step(plan, device, model, optimizer, step)
        graphs.append(device.graphs() - before)
        if step in options.get("save_at", range(1000)):
            with fault(options, step, device.rank):
                save(checkpoints, optimizer, step)
            assert device.graphs() - before == graphs[-1], "saving made a graph"
            say(rank=device.rank, step=step, failed=bool(checkpoints.last.failure))
    say(
        rank=device.rank,
        first=first,
        graphs=graphs,
        misses=cache_misses(device),
        state_bytes=state_bytes(optimizer),
    )
    device.close()


def make_model(plan, device):
    torch.manual_seed(plan.seed)
    model = Model().to(device.torch_device)
    model.head.weight = model.embed.weight
    settings = optimizer_settings("adamw", weight_decay=0.1, max_norm=0.5, beta2=0.95)
    return model, make_optimizer(settings, device, model.named_parameters())


def save(checkpoints, optimizer, step):
    checkpoints.save(step, optimizer)
    checkpoints.wait()


def train_step(plan, device, model, optimizer, step):
    for unit in worker_units(plan, worker=device.rank, step=step):
        generator = torch.Generator().manual_seed(unit.seed)
        tokens = device.put(torch.randint(7, (3,), generator=generator))
        weight = device.put(torch.tensor([unit.weight / plan.batch.units]))
        (cross_entropy(model(tokens), tokens) * weight).backward()
        device.sync()
    optimizer.step(0.01 * step)
    device.sync()


@contextmanager
def fault(options, step, rank):
    """Let the save of a step go wrong; it is over before anyone can begin the next one."""
    wrong = (step, rank) == (options.get("fault_at"), options.get("fault_rank"))
    if wrong:
        FAULTS[options["fault"]]()
    yield
    if wrong:
        Path("checkpoints/filler").unlink(missing_ok=True)


def write_half_and_hang():
    def write_half(memory, path):
        path.write_bytes(bytes(100))
        Path("hangs").write_text("yes")
        time.sleep(3600)

    HostCopy.write = write_half


def fill_the_disk():
    try:
        Path("checkpoints/filler").write_bytes(bytes(1 << 20))
    except OSError as error:
        assert error.strerror == "No space left on device"
    else:
        raise AssertionError("the disk is too large for this test")


FAULTS = {function.__name__: function for function in (write_half_and_hang, fill_the_disk)}


def say(**values):
    # In one write: those of other workers cannot come in between.
    os.write(1, (json.dumps(values) + "\n").encode())


if __name__ == "__main__":
    run_job(main)
