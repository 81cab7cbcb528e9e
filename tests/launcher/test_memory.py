"""What fits into a device: the sizes of models, and the one published table of what did."""

from __future__ import annotations

import json

import pytest

from trnslurm.config import Workspace, packaged_root, resolve
from trnslurm.plan.memory import Memory, estimate_memory, shape_of
from trnslurm.plan.spec import make_spec

WORKSPACE = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")


def memory_of(recipe: str, preset: str, cluster: str, *settings: str, nodes: int = 1) -> Memory:
    config = resolve(WORKSPACE, recipe, cluster=cluster, preset=preset, settings=[*settings])
    memory = estimate_memory(make_spec(config, nodes, need_time=False))
    assert memory is not None
    return memory


def samples(number: int) -> tuple[str, str]:
    return f"batch.per_worker={number}", f"batch.micro_batch={number}"


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("llama3_clm", 8_030_261_248),  # what Hugging Face counts, as for the others
        ("gpt2_zero1", 1_557_611_200),
        ("bert_pretrain", 336_226_108),
    ],
)
def test_parameters_of_the_models(recipe: str, parameters: int) -> None:
    shape = shape_of(resolve(WORKSPACE, recipe, cluster="trn1").recipe.model)
    assert shape is not None and shape.parameters == parameters


def test_other_models_are_not_known() -> None:
    assert shape_of({"layers": 3}) is None
    assert shape_of({"hidden_size": 64}) is None


@pytest.mark.parametrize(
    ("preset", "number", "fits"),
    [
        ("fsdp", 1, True), ("fsdp", 2, False), ("deepspeed", 1, True), ("deepspeed", 2, False),
        ("xla_fsdp", 1, True), ("xla_fsdp", 2, True), ("xla_fsdp", 3, True),
    ],
)  # fmt: skip
def test_what_the_tutorial_saw_on_80_gb(preset: str, number: int, fits: bool) -> None:
    assert memory_of("llama3_clm", preset, "p4de", *samples(number)).fits == fits


def test_40_gb_are_too_few_without_checkpointing() -> None:
    assert not memory_of("llama3_clm", "fsdp", "p4d").fits
    assert memory_of("llama3_clm", "fsdp", "p4d", "train.gradient_checkpointing=true").fits


def test_more_workers_divide_the_state_and_nothing_else() -> None:
    one, four = (memory_of("llama3_clm", "fsdp", "p4de", nodes=n) for n in (1, 4))
    assert one.state == pytest.approx(8_030_261_248 * 16 / 8 / 2**30)
    assert four.state == pytest.approx(one.state / 4)
    assert (four.gathered, four.activations) == (one.gathered, one.activations)
    sgd = memory_of("llama3_clm", "fsdp", "p4de", "train.optimizer=sgd")
    assert sgd.state == pytest.approx(one.state / 2)


@pytest.mark.parametrize(
    ("settings", "bytes_each"),
    [
        (("precision=fp32",), 16), (("precision=mixed",), 16), ((), 20),
        (("train.optimizer_precision=fp32_state",), 12),
        (("train.optimizer_precision=as_model",), 8),
        (("train.zero1=true",), 8 + 12 / 32),
        (("precision=fp32", "train.optimizer=sgd"), 8),
    ],
)  # fmt: skip
def test_what_every_worker_has_of_bert(settings: tuple[str, ...], bytes_each: float) -> None:
    memory = memory_of("bert_pretrain", "phase1", "trn1", *settings)
    assert memory.state == pytest.approx(336_226_108 * bytes_each / 2**30)
    assert memory.available == 16 and memory.gathered == 0


def test_plan_prints_the_estimate_and_warns(site, cli) -> None:
    lines = cli("plan", "llama3_clm", "--cluster", "p4d", "--nodes", "1,2").out.splitlines()
    assert lines[-2].startswith(
        "GiB of a device's 40, an estimate: 56.3 on 1 node, 48.8 on 2 nodes"
    )
    assert lines[-1] == (
        "warning: too much for p4d.24xlarge on 1, 2 nodes: "
        "try train.gradient_checkpointing=true or devices with more memory"
    )
    assert "warning" not in cli("plan", "llama3_clm", "--nodes", "1").out
    [row] = json.loads(cli("plan", "llama3_clm", "--nodes", "1", "--json").out)["plans"]
    memory = row["memory"]
    assert memory.pop("fits") and memory.pop("available") == 80
    assert memory.pop("total") == pytest.approx(sum(memory.values()))
    assert memory.keys() == {"state", "gathered", "activations", "runtime"}
    assert "GiB" not in cli("plan", "gpt2_zero1", "--nodes", "1", "--cluster", "trn1").out
