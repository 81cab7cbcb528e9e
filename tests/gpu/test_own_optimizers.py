"""Optimizers of a job's own on the device: any of PyTorch's, and Muon in a whole training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .test_recipes import AS_ON_CPU, AS_WITHOUT_STOP, NORM_AS_ON_CPU
from .trainings import Trainings, apart

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("own")]
MUON = {"train__optimizer": "muon", "train__eval_every": 0, "train__save_every": 5}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_optimizer_resumes_bit_for_bit(
    device: str,
    saw: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    """Saves and loads what each optimizer of PyTorch keeps, on 2, 3 and 1 workers."""
    import torch

    from trnslurm.train.optim.data_parallel import DataParallel

    from ..train.optimizers import MADE, Team, assert_goes_on

    monkeypatch.setattr(DataParallel, "_reduce", lambda self: None)
    for name, make in MADE.items():
        team = partial(Team, make=make, dtype=getattr(torch, dtype), on=device)
        assert_goes_on(tmp_path / name, team)
    saw(optimizers=len(MADE))


def test_muon(trainings: Trainings, saw: Callable[..., None]) -> None:
    """Trains with Muon beside AdamW: the losses of a CPU, and of a run without a stop."""
    ended = trainings.run(trainings.render("gpt2_zero1", **MUON, train__stop_at=10)).well()
    on_cpu = trainings.run(
        trainings.render("gpt2_zero1", device="cpu", **MUON, train__stop_at=5)
    ).well()
    loss, norm = apart(on_cpu, ended), apart(on_cpu, ended, "grad_norm")
    again = trainings.again_from(ended, 5).well()
    assert min(again.column("loss")) == 6
    resumed = apart(again, ended)
    saw(loss_off=loss, norm_off=norm, resumed_off=resumed)
    # Its 16 bits round elsewhere on a GPU.
    assert loss < 10 * AS_ON_CPU and norm < 10 * NORM_AS_ON_CPU and resumed < AS_WITHOUT_STOP
