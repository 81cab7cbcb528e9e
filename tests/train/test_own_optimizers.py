"""Optimizers of a job's own: what they keep survives a change of the number of workers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.make import make_optimizer
from trnslurm.train.optim.muon import Muon, orthogonalize
from trnslurm.train.optim.own import share_out

from .optimizers import MADE, RATE, Team, assert_equal, assert_goes_on, settings_of, two


@pytest.fixture(autouse=True)
def no_others(monkeypatch):
    monkeypatch.setattr(DataParallel, "_reduce", lambda self: None)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "fp32_copy"), (torch.bfloat16, "fp32_copy"), (torch.bfloat16, "as_model")],
    ids=["fp32", "bf16 with copies", "bf16"],
)
@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_bit_for_bit_on_other_workers(tmp_path, name, dtype, precision):
    assert_goes_on(tmp_path, partial(Team, make=MADE[name], dtype=dtype, precision=precision))


def test_every_group_follows_the_schedule_from_a_rate_of_its_own(tmp_path):
    team = Team(tmp_path, 1, two)
    [(_, optimizer, _)] = team.workers
    team.train(4)
    rates = [group["lr"] for each in optimizer._inside for group in each.param_groups]
    assert rates == pytest.approx([2 * RATE / 4, 0.5 * RATE / 4, RATE / 4])


def test_a_checkpoint_without_state_starts_at_zero(tmp_path):
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
    with pytest.raises(TrainError, match="does not run on neuron, because XLA would compile"):
        make_optimizer(settings_of(), device, [("p", nn.Parameter(torch.ones(2)))], two)


def test_owners_have_about_as_much_each():
    sizes = {"a": 10, "b": 60, "c": 30, "d": 30, "e": 10}
    owners = share_out(sizes, 3)
    assert owners == {"b": 0, "c": 1, "d": 2, "a": 1, "e": 2}
    assert set(share_out({"a": 1}, 4).values()) == {0}


def test_muon_makes_matrices_orthogonal():
    torch.manual_seed(3)
    for shape in ((6, 20), (20, 6), (8, 8)):
        matrix = torch.randn(shape)
        values = torch.linalg.svdvals(orthogonalize(matrix))
        assert values.min() > 0.6 and values.max() < 1.3
        whole = torch.linalg.svd(matrix, full_matrices=False)
        assert (orthogonalize(matrix) * (whole.U @ whole.Vh)).sum() > 0.85 * min(shape)


def test_muon_takes_the_steps_of_pytorchs():
    """That one computes in 16 bits."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10)) for _ in range(2))
    decay = {"lr": 0.1, "weight_decay": 0.1}
    mine = Muon([ours], **decay)
    other = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **decay)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ours.grad = torch.randn(6, 10, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    assert torch.allclose(ours, theirs, atol=0.01)
    assert not torch.allclose(ours, torch.linspace(-1, 1, 60).view(6, 10), atol=0.1)
