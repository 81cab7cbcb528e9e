"""LAMB: timm's numbers, on XLA and any number of workers too, where nothing compiles late."""

import pytest
import timm.optim.lamb as timm_lamb
import torch

from trnslurm.train.errors import TrainError
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.optim.make import make_optimizer

from .conftest import JOBS
from .launches import Launches, Scenario
from .make_shards import make_shards
from .measures import optimizer_settings

OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-6}


def parameters():
    """Of different sizes, one of them zero, so that its trust ratio has no meaning."""
    dice = torch.Generator().manual_seed(1)
    shapes = [(8, 4), (3, 3), (4,)]
    made = [torch.nn.Parameter(torch.randn(shape, generator=dice)) for shape in shapes]
    with torch.no_grad():
        made[1].zero_()
    matrices, vectors = made[:2], made[2:]
    return made, [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]


def test_the_numbers_are_those_of_timms_class():
    ours, our_groups = parameters()
    theirs, their_groups = parameters()
    lamb = Lamb(our_groups, 0.02, **OPTIONS)
    timm = timm_lamb.Lamb(their_groups, 0.02, max_grad_norm=None, trust_clip=True, **OPTIONS)
    dice = torch.Generator().manual_seed(2)
    for _ in range(20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=dice)
            other.grad = one.grad.clone()
        lamb.step()
        timm.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_zero1_is_refused():
    with pytest.raises(TrainError, match=r"set train\.zero1=false, or take adamw"):
        make_optimizer(optimizer_settings("lamb"), None, [], zero1=True)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lamb")
    make_shards(directory / "shards", [37, 27])
    launches = Launches(directory, directory / "shards", JOBS / "bert_pretrain")
    # The bias corrections of these betas become exactly 1.0 within eight steps.
    lamb = {
        "train__optimizer": "lamb", "train__lr": 0.02, "train__beta1": 0.1, "train__beta2": 0.1,
        "model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0,
        "train__eval_every": 0, "train__save_every": 0, "steps": 12,
        "model__num_hidden_layers": 1, "model__hidden_size": 32, "model__intermediate_size": 64,
    }  # fmt: skip
    saved = lamb | {"train__save_every": 6}
    launches.launch(1, Scenario("cpu", lamb), device="cpu")
    launches.launch(1, Scenario("xla-1", lamb), Scenario("resumed", saved | {"train__stop_at": 6}))
    launches.launch(2, Scenario("xla-2", lamb), Scenario("resumed", saved))
    return launches


@pytest.mark.parametrize("name", ["xla-1", "xla-2", "resumed"])
def test_the_same_on_xla_on_any_number_of_workers_and_after_a_stop(trainings, name):
    expected, outcome = trainings.outcome("cpu"), trainings.outcome(name)

    for key in ("loss", "grad_norm"):
        assert outcome.column(key) == pytest.approx(expected.column(key), rel=1e-4)


def test_nothing_compiles_late(trainings):
    for name in ("xla-1", "xla-2"):
        graphs = trainings.outcome(name).column("graphs")
        assert graphs[-1] == graphs[1]
