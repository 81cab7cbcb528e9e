"""Train a small model exactly as the real jobs do: same loop, same runtime, no transformers.

What differs from jobs/gpt2_zero1/train.py is the model, and that a drill sets the pace.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from disk import note_disk
from drill import Drill
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Device
from trnslurm.train.loop.job import open_job, run_job
from trnslurm.train.loop.progress import Reporting, count_parameters
from trnslurm.train.loop.run import TrainingRun
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    pause_s: float
    note_disk: bool


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    job = open_job(Settings, "Train a small model.")
    plan, settings, device = job.plan, job.settings, job.device
    drill = Drill(job.environment, pause_s=settings.pause_s)
    if settings.note_disk:
        note_disk(job.environment)
    # Any text will do, and this one is there.
    text = open_text(Path(__file__), seq_len=plan.seq_len, seed=plan.seed)
    model = make_model(plan).to(device.torch_device)
    optimizer = make_optimizer(settings, device, model.named_parameters())
    run = TrainingRun(
        job,
        optimizer,
        data=text.fingerprint,
        samples_per_epoch=text.num_blocks,
        reporting=Reporting(),
    )
    run.describe(count_parameters(model), each=f"{plan.batch.global_batch} samples")
    drill.began()

    predicted = plan.batch.global_batch * (plan.seq_len - 1)
    model.train()
    for step in run.steps():
        drill.pause(step)
        units = run.units(step)
        for unit in units:
            loss = unit_loss(model, device, text, unit, predicted)
            loss.backward()
            run.add(loss)
        drill.note(step, units)
        run.end(step, optimizer.step(run.lr(step)))
    run.close(model.parameters)


def unit_loss(model: nn.Module, device: Device, text: Text, unit: Unit, predicted: int) -> Tensor:
    """Return a unit's share of the mean loss over so many tokens."""
    tokens = device.put(text.samples(unit.first, unit.size))
    device.seed(unit.seed)
    logits = model(tokens[:, :-1])
    total = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total * (unit.weight / predicted)


def make_model(plan: JobPlan) -> nn.Module:
    """Make a model that has dropout, and the same parameters on every worker."""
    torch.manual_seed(plan.seed)
    vocabulary, width = plan.model["vocab_size"], plan.model["width"]
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Dropout(plan.model["dropout"]),
        nn.Linear(width, vocabulary),
    )


if __name__ == "__main__":
    run_job(main)
