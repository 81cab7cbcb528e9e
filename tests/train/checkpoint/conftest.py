"""Checkpoints in one process: the workers are objects that share a store, the files are real."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.contract.checkpoints import checkpoints_in, step_of
from trnslurm.contract.rundir import RunFiles
from trnslurm.devices import CPU
from trnslurm.saves.commit import SaveOutcome
from trnslurm.train.checkpoint.checkpoints import CheckpointPolicy, Checkpoints
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.plan import JobPlan

from ..measures import optimizer_settings


class Model(nn.Module):
    """Shapes that divide by no number of workers, a scalar, a tied weight, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.linear = nn.Linear(width, 11)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("own", torch.rand(3), persistent=False)


class Team:
    """All workers of one attempt; what training would do is set by hand."""

    names = ("embed.weight", "linear.weight", "linear.bias", "scale", "seen")

    def __init__(
        self,
        run_dir: Path,
        plan: JobPlan,
        *,
        attempt: int = 1,
        phase: str = "train",
        width: int = 5,
        dtype: torch.dtype = torch.float32,
        optimizer: str = "adamw",
        precision: str = "fp32_copy",
        facts: dict[str, Any] | None = None,
        frozen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        policy = CheckpointPolicy(**options)
        self.root = run_dir / "checkpoints"
        self.workers = plan.workers
        self.models: list[nn.Module] = []
        self.optimizers = []
        self.checkpoints = []
        environment: Any = SimpleNamespace(files=RunFiles(run_dir), attempt=attempt, phase=phase)
        settings = optimizer_settings(optimizer, weight_decay=0.1, beta2=0.99)
        how = {"zero1": False, "precision": precision}
        store = dist.HashStore()
        for rank in range(plan.workers):
            device: Any = SimpleNamespace(
                rank=rank,
                world=plan.workers,
                local_world=1,
                kind=CPU,
                name=CPU.name,
                timer=Timer(),
                torch_device=torch.device("cpu"),
            )
            device.say = partial(Device.say, device)
            model = Model(width).to(dtype)
            self.models.append(model)
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
            named: Any = model.state_dict(keep_vars=True).items()
            self.optimizers.append(make_optimizer(settings, device, named, **how))
            self.checkpoints.append(
                Checkpoints(device, plan, environment, policy, store=store, facts=facts)
            )

    def value(self, name: str, kind: str, step: int) -> Tensor:
        """What a tensor shall be after a step."""
        seed = hash((self.names.index(name), len(kind), step)) % 2**31
        shape = self.optimizers[0].whole_shapes()[name]
        if name == "seen":
            return torch.tensor(step)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def train_to(self, step: int) -> None:
        """Set every tensor to what it shall be after a step."""
        for optimizer in self.optimizers:
            optimizer.load(lambda name, kind, rows: self.value(name, kind, step), updates=step)

    def begin_save(self, step: int, score: float | None = None) -> None:
        """Train to a step and save."""
        self.train_to(step)
        for one, optimizer in zip(self.checkpoints, self.optimizers, strict=True):
            one.save(step, optimizer, score=score)

    def close(self) -> list[SaveOutcome]:
        """Wait for the save; give every worker's outcome."""
        for one in self.checkpoints:
            one.wait()
        return [one.last for one in self.checkpoints if one.last]

    def save(self, *steps: int) -> list[SaveOutcome]:
        """Save after each step; give the outcomes of the last, by worker."""
        outcomes = []
        for step in steps:
            self.begin_save(step)
            outcomes = self.close()
        return outcomes

    def resume(self) -> int:
        """Load the newest; give its step, or 0."""
        manifests = [one.newest() for one in self.checkpoints]
        assert all(manifest == manifests[0] for manifest in manifests)
        if manifests[0] is None:
            return 0
        for one, optimizer in zip(self.checkpoints, self.optimizers, strict=True):
            one.load(manifests[0], optimizer)
        return manifests[0].step

    def holds(self, step: int) -> bool:
        """Tell whether every tensor of every worker is, bit for bit, what it shall be."""
        return all(
            torch.equal(tensor, self.value(name, kind, step).to(tensor.dtype))
            for optimizer in self.optimizers
            for name, parameter, holder in optimizer._triples()
            for kind, tensor in [
                ("parameter", parameter),
                # Empty between steps where no copy is kept.
                *([("parameter", holder)] if holder.shape == parameter.shape else []),
                *optimizer._base.state[holder].items(),
            ]
            if kind != "step"
        ) and all(
            torch.equal(tensor, self.value(name, "parameter", step).to(tensor.dtype))
            for optimizer in self.optimizers
            for name, tensor in optimizer._spec.frozen.items()
        )

    def steps(self) -> list[int]:
        """The steps of all checkpoints, oldest first."""
        return [step_of(path.name) or 0 for path in reversed(checkpoints_in(self.root))]

    def others(self) -> list[str]:
        """Whatever else lies among the checkpoints."""
        names = {path.name for path in self.root.iterdir()}
        return sorted(names - {f"step-{step:08d}" for step in self.steps()})

    def file(self, step: int, rank: int = 1) -> Path:
        """The file of a worker."""
        return self.root / f"step-{step:08d}" / f"rank-{rank:05d}-of-{self.workers:05d}.safetensors"


@pytest.fixture
def team(tmp_path: Path, make_plan: Callable[..., JobPlan]) -> Callable[..., Team]:
    """Make the workers of one attempt: team(3, attempt=2, keep_last=4, plan={"steps": 5})."""

    def make(workers: int = 2, *, plan: dict[str, Any] | None = None, **options: Any) -> Team:
        changed = dict(plan or {})
        micro_batch = changed.pop("micro_batch", 2)
        made = make_plan(units=24, workers=workers, micro_batch=micro_batch)
        return Team(tmp_path, replace(made, **changed), **options)

    return make
