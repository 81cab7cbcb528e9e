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

from trnslurm.train.checkpoint import Checkpoints, open_checkpoints
from trnslurm.train.data.text import Text, open_text
from trnslurm.train.data.units import Unit, worker_units
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment, read_environment
from trnslurm.train.loop.agreement import conclude
from trnslurm.train.loop.job import check_world, run_job
from trnslurm.train.loop.progress import Progress
from trnslurm.train.loop.schedule import SaveTimes, learning_rate, steps_to_run, total_steps
from trnslurm.train.loop.supervision import Supervision
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.optimizer import GlobalOptimizer
from trnslurm.train.plan import Plan, describe_plan, parse_plan, read_settings
from trnslurm.train.say import say
from trnslurm.train.settings import CommonSettings


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """The recipe's train section."""

    pause_s: float
    note_disk: bool


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works with."""

    plan: Plan
    settings: Settings
    steps: int
    device: Device
    text: Text
    model: nn.Module
    optimizer: GlobalOptimizer
    checkpoints: Checkpoints
    drill: Drill


def main() -> None:
    """Train as plan.json says, from the newest checkpoint if there is one."""
    plan = parse_plan("Train a small model.")
    settings = read_settings(Settings, plan, not_zero=("log_every",))
    environment = read_environment()
    device = open_device(plan.device, environment)
    check_world(plan, device)

    run = make_training(plan, settings, device, environment)
    if device.rank == 0:
        say(describe_plan(plan, environment))
    supervision = run_training(run, environment)
    device.close()
    supervision.note_stop()


def run_training(run: Training, environment: Environment) -> Supervision:
    """Train to the end, or as far as this run shall go."""
    run.drill.began()
    done = run.checkpoints.resume(run.optimizer)
    steps = steps_to_run(environment, done=done, stop_at=run.settings.stop_at, steps=run.steps)
    saves = SaveTimes(run.settings, last=steps.stop)
    progress = Progress(
        run.plan,
        environment,
        run.device,
        steps=steps,
        log_every=run.settings.log_every,
        ask=saves.overdue,
    )

    # Go!
    with Supervision(run.plan, run.settings, run.device, environment, progress) as supervision:
        train(run, progress, saves, supervision)

    run.checkpoints.require_last()
    progress.close()
    if not supervision.stopped:
        conclude(run.device, run.model, environment)
    return supervision


def train(run: Training, progress: Progress, saves: SaveTimes, supervision: Supervision) -> None:
    """Run the steps."""
    plan, settings, device = run.plan, run.settings, run.device
    predicted = plan.batch.global_batch * (plan.seq_len - 1)
    loss_sum = device.put(torch.zeros(1))
    run.model.train()
    for step in progress.steps:
        run.drill.pause(step)
        units = worker_units(plan, worker=device.rank, step=step)
        for unit in units:
            loss = unit_loss(run, unit, predicted)
            loss.backward()
            loss_sum += loss.detach()
            device.sync()

        lr = learning_rate(settings, step=step, steps=run.steps)
        grad_norm = run.optimizer.step(lr)
        step_loss = loss_sum.clone()
        loss_sum.zero_()
        run.optimizer.zero_grad()
        device.sync()

        done = step + 1
        run.drill.note(done, units)
        overdue = progress.note(done, loss=step_loss, grad_norm=grad_norm, lr=lr)
        stops = supervision.step_done(done)
        if saves.due(done, overdue=overdue or stops):
            progress.report()
            samples = done * plan.batch.global_batch
            run.checkpoints.save(step=done, samples=samples, optimizer=run.optimizer)
        run.checkpoints.poll()
        if stops:
            break


def unit_loss(run: Training, unit: Unit, predicted: int) -> Tensor:
    """Give a unit's share of the mean loss over so many tokens."""
    tokens = run.device.put(run.text.samples(unit.first, unit.size))
    run.device.seed(unit.seed)
    logits = run.model(tokens[:, :-1])
    total = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total * (unit.weight / predicted)


def make_training(
    plan: Plan, settings: Settings, device: Device, environment: Environment
) -> Training:
    """Make what the loop works with, on the device."""
    drill = Drill(environment, pause_s=settings.pause_s)
    if settings.note_disk:
        note_disk(environment)
    # Any text will do, and this one is there.
    text = open_text(Path(__file__), seq_len=plan.seq_len, seed=plan.seed)
    model = make_model(plan).to(device.torch_device)
    optimizer = make_optimizer(
        settings.optimizer,
        device,
        model.named_parameters(),
        weight_decay=settings.weight_decay,
        max_norm=settings.max_norm,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    data = text.fingerprint
    return Training(
        plan=plan,
        settings=settings,
        steps=total_steps(plan, epochs=settings.epochs, samples_per_epoch=text.num_blocks),
        device=device,
        text=text,
        model=model,
        optimizer=optimizer,
        checkpoints=open_checkpoints(plan, settings, device, environment, data=data),
        drill=drill,
    )


def make_model(plan: Plan) -> nn.Module:
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
