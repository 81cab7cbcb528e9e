"""LAMB: timm's numbers. test_bert_job trains with it, on XLA and any number of workers too."""

import pytest
import timm.optim.lamb as timm_lamb
import torch

from trnslurm.train.errors import TrainError
from trnslurm.train.optim.lamb import Lamb
from trnslurm.train.optim.make import make_optimizer

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
    with pytest.raises(TrainError, match="lamb with fp32_copy is incompatible with ZeRO-1"):
        make_optimizer(optimizer_settings("lamb"), None, [], zero1=True)
