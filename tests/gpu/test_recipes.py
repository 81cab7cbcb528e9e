"""Every recipe's small preset on the device, as its rendered train.sh and node.sh run it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from .trainings import RECIPES, Trainings, apart

pytestmark = pytest.mark.gpu
# fp32 without TF32, so a CPU rounds elsewhere only. Steps amplify it: the first five are compared.
AS_ON_CPU = 1e-3
NORM_AS_ON_CPU = 1e-2
# Backward passes of fused attention add up in any order on a GPU, so nothing need be equal.
AS_WITHOUT_STOP = 1e-3
# bf16 has three digits.
AS_FP32 = 0.03
FEW = {"train__stop_at": 10, "train__eval_every": 0, "train__save_every": 0}


def recipes(*names: str) -> pytest.MarkDecorator:
    """Run a test for recipes; those of one recipe share a process, and so its training."""
    lacks_deepspeed = importlib.util.find_spec("deepspeed") is None
    skip = pytest.mark.skipif(lacks_deepspeed, reason="deepspeed is not installed here")
    marks = {name: [pytest.mark.xdist_group(name)] for name in names}
    if "deepspeed" in marks:
        marks["deepspeed"].append(skip)
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n]) for n in names])


@recipes(*RECIPES)
def test_trains(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Trains its preset to the end: the loss falls, checkpoints are there, workers agree."""
    ended = trainings.trained(name)
    losses = list(ended.column("loss").values())
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3
    assert "ranks agree" in ended.log
    assert [*ended.directory.glob("checkpoints/step-*/manifest.json")]
    saw(first_loss=f"{losses[0]:.4f}", last_loss=f"{losses[-1]:.4f}")


@recipes(*RECIPES)
def test_losses_are_those_of_a_cpu(
    trainings: Trainings, saw: Callable[..., None], name: str
) -> None:
    """Has the losses and gradient norms of a CPU in its first five steps."""
    loss, norm = off(trainings, saw, name, ("loss", "grad_norm"), device="cpu", train__stop_at=5)
    assert loss < AS_ON_CPU and norm < NORM_AS_ON_CPU


def off(
    trainings: Trainings,
    saw: Callable[..., None],
    name: str,
    keys: tuple[str, ...] = ("loss",),
    **changes: Any,
) -> list[float]:
    """Train a few steps with changes; return how far numbers are from those of the recipe."""
    ended = trainings.run(trainings.render(name, **FEW | changes)).well()
    found = [apart(ended, trainings.trained(name), key) for key in keys]
    saw(**dict(zip(("loss_off", "norm_off"), found, strict=False)))
    return found


@recipes(*RECIPES)
def test_resumes(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Resumes from its last but one checkpoint with the losses of a run without a stop."""
    ended = trainings.trained(name)
    steps = sorted(int(file.name[5:]) for file in ended.directory.glob("checkpoints/step-*"))
    again = trainings.again_from(ended, steps[-2]).well()
    assert f"resuming from step-{steps[-2]:08d}" in again.log
    assert min(again.column("loss")) == steps[-2] + 1
    loss, norm = apart(again, ended), apart(again, ended, "grad_norm")
    saw(loss_off=loss, norm_off=norm, bitwise="yes" if loss == norm == 0 else "no")
    assert loss < AS_WITHOUT_STOP and norm < 10 * AS_WITHOUT_STOP


@recipes("gpt2_zero1", "bert_mrpc")
def test_resumes_with_dropout(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Drops the same after a stop as without one: each unit's seed is its own."""
    ended = trainings.run(trainings.render(name, dropout=True)).well()
    steps = sorted(int(file.name[5:]) for file in ended.directory.glob("checkpoints/step-*"))
    loss = apart(trainings.again_from(ended, steps[-2]).well(), ended)
    saw(loss_off=loss)
    assert loss < AS_WITHOUT_STOP


@recipes("gpt2_zero1", "bert_pretrain", "fsdp", "deepspeed")
def test_bf16(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Computes in bf16 (autocast, or of a sharded model) what it computes in fp32."""
    precision = "bf16" if name in ("fsdp", "deepspeed") else "mixed"
    [loss] = off(trainings, saw, name, precision=precision)
    assert 0 < loss < AS_FP32


@recipes("gpt2_zero1")
def test_bf16_throughout(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Trains parameters in bf16, of which the optimizer keeps copies in fp32."""
    [loss] = off(trainings, saw, name, precision="bf16")
    assert 0 < loss < AS_FP32


@recipes("fsdp")
def test_flash_attention(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Computes with the package flash-attn what PyTorch's attention does, where it is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed here: seen with PyTorch's attention only")
    flash = {"precision": "bf16", "train__attention": "flash_attention_2"}
    [loss] = off(trainings, saw, name, **flash)
    assert loss < AS_FP32


@recipes("gpt2_zero1", "fsdp", "deepspeed")
def test_recomputes_activations(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Has the same losses when activations are computed again in the backward pass."""
    [loss] = off(trainings, saw, name, train__gradient_checkpointing=True)
    assert loss < AS_WITHOUT_STOP


@recipes("gpt2_zero1", "bert_pretrain", "bert_mrpc", "fsdp")
def test_compiled(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Has the same losses with layers that torch.compile has compiled, in a few graphs."""
    changes = FEW | {"train__compile": True}
    if name in ("gpt2_zero1", "fsdp"):
        changes["train__gradient_checkpointing"] = True
    ended = trainings.run(trainings.render(name, **changes)).well()
    graphs = max(ended.column("graphs").values())
    loss = apart(ended, trainings.trained(name))
    saw(loss_off=loss, graphs=graphs)
    assert loss < AS_WITHOUT_STOP and 1 <= graphs <= 4


@recipes("gpt2_zero1")
def test_compiled_resumes(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Drops the same after a stop, with compiled layers too."""
    bundle = trainings.render(name, dropout=True, train__compile=True)
    ended = trainings.run(bundle).well()
    steps = sorted(int(file.name[5:]) for file in ended.directory.glob("checkpoints/step-*"))
    loss = apart(trainings.again_from(ended, steps[-2]).well(), ended)
    saw(loss_off=loss)
    assert loss < AS_WITHOUT_STOP


@recipes("bert_pretrain")
def test_lamb(trainings: Trainings, saw: Callable[..., None], name: str) -> None:
    """Has the losses of a CPU with LAMB, where timm is installed."""
    timm = pytest.importorskip("timm.optim.lamb", reason="timm is not installed here")
    if not hasattr(timm, "lamb"):
        pytest.skip("timm has no lamb() in this version: pyproject.toml has one that does")
    lamb = FEW | {"train__optimizer": "lamb", "train__stop_at": 5}
    runs = [trainings.run(trainings.render(name, device=d, **lamb)).well() for d in ("", "cpu")]
    loss = apart(*runs)
    saw(loss_off=loss)
    assert loss < AS_ON_CPU


@recipes("gpt2_zero1", "fsdp", "deepspeed")
def test_several_workers(
    trainings: Trainings, gpus: int, saw: Callable[..., None], name: str
) -> None:
    """Has on two workers the losses of one; NCCL needs a GPU for each."""
    if gpus < 2:
        pytest.skip("one GPU: NCCL has no two workers on it")
    loss, norm = off(trainings, saw, name, ("loss", "grad_norm"), workers=2, train__stop_at=5)
    assert loss < AS_ON_CPU and norm < NORM_AS_ON_CPU
