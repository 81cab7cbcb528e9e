"""Optimizers of all kinds, and workers that save and load what these keep."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from trnslurm.contract.rundir import RunFiles
from trnslurm.train.checkpoint.checkpoints import CheckpointPolicy, Checkpoints
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.settings import CommonSettings

RATE = 0.01


class Everything(torch.optim.Optimizer):
    """Keeps whatever a checkpoint can have, and counts in its group, as Prodigy does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0, "spread": (1.0, 2.0), "d": 1e-6})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["d"] *= 1.5
            group["spread"] = (group["d"], 2.0)
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state |= {"steps": 0, "nothing": None, "word": "a/b", "flag": False}
                    state |= {"rows": each.new_zeros(each.shape[0]), "total": each.new_zeros(())}
                    state |= {"seen": torch.zeros(2, 3, dtype=torch.int64)}
                    state["wide"] = each.new_zeros(each.shape, dtype=torch.float64).t()
                state["steps"] += 1
                state["flag"] = not state["flag"]
                state["rows"] += each.grad.reshape(each.shape[0], -1).mean(1)
                state["total"] += each.grad.sum()
                state["seen"] += 1
                state["wide"].t().add_(each.grad)
                change = state["rows"].reshape(-1, *[1] * (each.ndim - 1)) + state["wide"].t()
                scale = group["count"] * state["steps"] + group["d"] + state["flag"]
                each.sub_(group["lr"] * scale * (change + state["total"]).to(each.dtype))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 11)
        self.second = nn.Linear(11, 7)


def two(named):
    """Muon for one matrix, AdamW for the rest, in two groups with rates of their own."""
    rest = [each for name, each in named.items() if name != "first.weight"]
    groups = [{"params": rest[:2], "lr": 0.5 * RATE}, {"params": rest[2:], "weight_decay": 0.0}]
    muon = torch.optim.Muon([named["first.weight"]], lr=2 * RATE)
    return [muon, torch.optim.AdamW(groups, lr=RATE)]


MADE = {
    cls.__name__: lambda named, cls=cls: cls(named.values(), lr=RATE)
    for cls in (
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Everything,
    )
} | {
    "amsgrad": lambda named: torch.optim.AdamW(named.values(), lr=RATE, amsgrad=True),
    "fused": lambda named: torch.optim.AdamW(named.values(), lr=RATE, fused=True),
    "a rate in a tensor": lambda named: torch.optim.AdamW(named.values(), lr=torch.tensor(RATE)),
    "momentum": lambda named: torch.optim.SGD(named.values(), lr=RATE, momentum=0.9),
    "Muon and AdamW": two,
}  # fmt: skip


def settings_of(**changes):
    values = dict.fromkeys(CommonSettings.__dataclass_fields__)
    return CommonSettings(**values | {"lr": RATE, "max_norm": 1.0, "optimizer": "own"} | changes)


class Team:
    """All workers of one attempt, in this process; each gets the gradients of all."""

    def __init__(
        self, run_dir, workers, make, *, attempt=1, dtype=torch.float32, on="cpu", **options
    ):
        environment = SimpleNamespace(files=RunFiles(run_dir), attempt=attempt, phase="train")
        plan = SimpleNamespace(
            batch=SimpleNamespace(global_batch=6, micro_batch=1), recipe="any", seq_len=1, seed=1,
            model={}, steps=9, precision="fp32", train={},
        )  # fmt: skip
        store = dist.HashStore()
        policy = CheckpointPolicy(**options.pop("policy", {}))
        self.workers = []
        for rank in range(workers):
            device = SimpleNamespace(
                rank=rank, world=workers, local_world=1, name=on, timer=Timer(),
                torch_device=torch.device(on), sync=lambda: None,
            )  # fmt: skip
            device.say = partial(Device.say, device)
            torch.manual_seed(1)
            model = Model().to(on, dtype)
            optimizer = make_optimizer(
                settings_of(), device, model.named_parameters(), make, **options
            )
            self.workers.append(
                (model, optimizer, Checkpoints(device, plan, environment, policy, store=store))
            )

    def train(self, *steps):
        for step in steps:
            for model, optimizer, _ in self.workers:
                generator = torch.Generator().manual_seed(step)
                for each in model.parameters():
                    gradient = torch.randn(each.shape, generator=generator).to(each)
                    (each * gradient).sum().backward()
                optimizer.step(RATE / step)

    def save(self, step):
        for _, optimizer, checkpoints in self.workers:
            checkpoints.save(step, optimizer)
        for _, _, checkpoints in self.workers:
            checkpoints.wait()
            assert not checkpoints.last.failure

    def resume(self):
        return {checkpoints.resume(optimizer) for _, optimizer, checkpoints in self.workers}

    def parameters(self):
        return [list(model.parameters()) for model, _, _ in self.workers]


def assert_equal(teams):
    """All workers of all teams have the same parameters, bit for bit."""
    first, *others = [parameters for team in teams for parameters in team.parameters()]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def assert_goes_on(run_dir, make):
    """A training on 2, 3 and 1 workers is the same as one without a stop."""
    whole = make(run_dir / "whole", 1)
    whole.train(1, 2, 3, 4, 5)
    stopped = make(run_dir, 2)
    stopped.train(1, 2)
    stopped.save(2)
    again = make(run_dir, 3, attempt=2)
    assert again.resume() == {2}
    again.train(3)
    again.save(3)
    last = make(run_dir, 1, attempt=3)
    assert last.resume() == {3}
    last.train(4, 5)
    again.train(4, 5)
    assert_equal([whole, again, last])
