"""The same bundle on this Python's PyTorch and on another's: `make test-newest`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from .test_recipes import FEW, recipes
from .trainings import RECIPES, Trainings, apart

OTHER = os.environ.get("TRNSLURM_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not OTHER, reason="TRNSLURM_OTHER_PYTHON names no other Python"),
]
# fp32, relative: other kernels may round elsewhere.
AS_ON_OTHER = 1e-6


@recipes(*(name for name in RECIPES if name != "deepspeed"))  # its version is pinned to torch 2.9
def test_losses_are_those_of_another_torch(
    trainings: Trainings, saw: Callable[..., None], name: str
) -> None:
    """Has the losses of another PyTorch, if both begin with the same parameters.

    transformers 5 draws the first parameters of BERT in another order than 4.
    """
    first = trainings.trained(name)
    bundle = trainings.render(name, train__init_from=first.directory / "checkpoints", **FEW)
    copy = bundle.with_name(f"{bundle.name}-other")
    shutil.copytree(bundle, copy)
    here, there = trainings.run(bundle).well(), trainings.run(copy, python=OTHER).well()
    loss, norm = (apart(here, there, key) for key in ("loss", "grad_norm"))
    losses = here.column("loss")
    saw(steps=len(losses), last_loss=f"{losses[max(losses)]:.6f}", loss_off=loss, norm_off=norm)
    assert loss < AS_ON_OTHER
