"""Optimizers of a job's own: what they keep survives a change of the number of workers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trnslurm.rundir import RunFiles
from trnslurm.train.checkpoint.checkpoints import Checkpoints
from trnslurm.train.checkpoint.saving import CheckpointPolicy
from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.own import share_out
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
                    state["wide"] = torch.zeros(each.shape, dtype=torch.float64).t()
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

    def __init__(self, run_dir, workers, make, *, attempt=1, dtype=torch.float32, **options):
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
                rank=rank, world=workers, local_world=1, name="cpu", timer=Timer(),
                torch_device=torch.device("cpu"), sync=lambda: None,
            )  # fmt: skip
            device.say = partial(Device.say, device)
            torch.manual_seed(1)
            model = Model().to(dtype)
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
                    gradient = torch.randn(each.shape, generator=generator).to(each.dtype)
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


@pytest.fixture(autouse=True)
def no_others(monkeypatch):
    monkeypatch.setattr(DataParallel, "_reduce", lambda self: None)


def assert_equal(teams):
    first, *others = [parameters for team in teams for parameters in team.parameters()]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "fp32_copy"), (torch.bfloat16, "fp32_copy"), (torch.bfloat16, "as_model")],
    ids=["fp32", "bf16 with copies", "bf16"],
)
@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_bit_for_bit_on_other_workers(tmp_path, name, dtype, precision):
    make = partial(Team, make=MADE[name], dtype=dtype, precision=precision)
    whole = make(tmp_path / "whole", 1)
    whole.train(1, 2, 3, 4, 5)
    stopped = make(tmp_path, 2)
    stopped.train(1, 2)
    stopped.save(2)
    again = make(tmp_path, 3, attempt=2)
    assert again.resume() == {2}
    again.train(3)
    again.save(3)
    last = make(tmp_path, 1, attempt=3)
    assert last.resume() == {3}
    last.train(4, 5)
    again.train(4, 5)
    assert_equal([whole, again, last])


def test_every_group_follows_the_schedule_from_a_rate_of_its_own(tmp_path):
    team = Team(tmp_path, 1, two)
    [(_, optimizer, _)] = team.workers
    team.train(4)
    rates = [group["lr"] for each in optimizer._inside for group in each.param_groups]
    assert rates == pytest.approx([2 * RATE / 4, 0.5 * RATE / 4, RATE / 4])


def test_a_checkpoint_without_state_begins_anew(tmp_path):
    team = Team(tmp_path, 2, MADE["AdamW"], policy={"save_optimizer": False})
    team.train(1)
    team.save(1)
    again = Team(tmp_path, 1, MADE["AdamW"], attempt=2)
    assert again.resume() == {1}
    [(_, optimizer, _)] = again.workers
    assert not optimizer._inside[0].state
    assert_equal([team, again])


def test_another_optimizer_is_refused(tmp_path):
    team = Team(tmp_path, 1, MADE["AdamW"])
    team.train(1)
    team.save(1)
    said = r"optimizer was \['parameter', 'AdamW'\], is \['parameter', 'Muon', 'AdamW'\]"
    with pytest.raises(TrainError, match=said):
        Team(tmp_path, 1, two, attempt=2).resume()


class Nested(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["factors"] = [torch.zeros(2)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda named: Nested(named.values()), "Nested keeps 'factors' of embed.weight as a list"),
        (lambda named: torch.optim.LBFGS(named.values()), "LBFGS.step needs a closure"),
        (
            lambda named: torch.optim.SGD([named["embed.weight"]]),
            "no optimizer gets first.weight, first.bias, second.weight, second.bias: give each",
        ),
        (
            lambda named: [torch.optim.SGD(named.values()), torch.optim.SGD(named.values())],
            "an optimizer gets a parameter twice",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, make, said):
    with pytest.raises(TrainError, match=said):
        Team(tmp_path, 1, make).train(1)


def test_xla_refuses_it_and_says_why():
    device = SimpleNamespace(torch_device=torch.device("xla", 0), name="neuron")
    with pytest.raises(TrainError, match="does not run on neuron: its steps and rates are numbers"):
        make_optimizer(settings_of(), device, [("p", nn.Parameter(torch.ones(2)))], two)


def test_owners_have_about_as_much_each():
    sizes = {"a": 10, "b": 60, "c": 30, "d": 30, "e": 10}
    owners = share_out(sizes, 3)
    assert owners == {"b": 0, "c": 1, "d": 2, "a": 1, "e": 2}
    assert set(share_out({"a": 1}, 4).values()) == {0}
