"""What fits into a device: the sizes of models, and the one published table of what did."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.plan.memory import (
    Memory,
    check_memory,
    estimate_memory,
    larger_micro_batch,
    shape_of,
    why_no_memory,
)
from trnslurm.plan.spec import make_spec

ROOT = Path(__file__).parents[2]
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
        ("bert_mrpc", 335_143_938),
        ("bert_sentiment", 108_312_579),
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
    torchacc = ("device=xla-cuda",) if preset == "xla_fsdp" else ()
    assert memory_of("llama3_clm", preset, "p4de", *samples(number), *torchacc).fits == fits


def test_gpt2_xl_fits_a_neuron_core_as_in_the_sample() -> None:
    """AWS's sample runs it so: mixed precision, recomputation, a sample at a time, ZeRO-1 by 32."""
    xl = memory_of("gpt2_zero1", "xl", "trn1")
    assert xl.fits and xl.total > 0.9 * xl.available
    assert not memory_of("gpt2_zero1", "xl", "trn1", "train.gradient_checkpointing=false").fits


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
        (("train.optimizer_precision=fp32_state",), 16),
        (("train.optimizer_precision=as_model",), 8),
        (("train.zero1=true",), 4 + 12 / 32),
        (("train.zero1=true", "precision=mixed"), 8 + 12 / 32),
        (("train.zero1=true", "train.optimizer_precision=as_model"), 4 + 6 / 32),
        (("precision=fp32", "train.optimizer=sgd"), 8),
    ],
)  # fmt: skip
def test_what_every_worker_has_of_bert(settings: tuple[str, ...], bytes_each: float) -> None:
    memory = memory_of("bert_pretrain", "phase1", "trn1", *settings)
    assert memory.state == pytest.approx(336_226_108 * bytes_each / 2**30)
    assert memory.available == 16 and memory.gathered == 0


@pytest.mark.parametrize(
    ("recipe", "cluster", "preset"),
    [
        ("gpt2_zero1", "trn1", "xl"), ("bert_pretrain", "trn1", "phase1"),
        ("bert_pretrain", "trn1", "phase2"), ("bert_mrpc", "trn1", "mrpc"),
        ("bert_sentiment", "trn1", "tweets"), ("llama3_clm", "p4de", "fsdp"),
    ],
)  # fmt: skip
def test_every_recipe_fits_at_its_published_size(recipe: str, cluster: str, preset: str) -> None:
    memory = memory_of(recipe, preset, cluster)
    assert memory.fits
    assert 0 < memory.activations_recomputed < memory.activations_kept


def test_plan_prints_the_estimate_and_warns(site, cli) -> None:
    lines = cli("plan", "llama3_clm", "--cluster", "p4d", "--nodes", "1,2").out.splitlines()
    here = lines.index("GiB of a worker's device (estimate):")
    assert [line.split() for line in lines[here + 2 : here + 5]] == [
        ["nodes", "parameters", "gradients", "optimizer", "gathered", "activations",
         "(recomputed)", "runtime", "total", "device"],
        ["1", "3.7", "3.7", "7.5", "7.5", "31.4", "8.7", "2.5", "56.4", "40"],
        ["2", "1.9", "1.9", "3.7", "7.5", "31.4", "8.7", "2.5", "48.9", "40"],
    ]  # fmt: skip
    assert lines[-1] == (
        "warning: on 1, 2 nodes, a worker is estimated to need more than the 40 GiB available on "
        "p4d.24xlarge: try --set train.gradient_checkpointing=true"
    )
    assert "warning" not in cli("plan", "llama3_clm", "--nodes", "1").out
    [row] = json.loads(cli("plan", "llama3_clm", "--nodes", "1", "--json").out)["plans"]
    memory = row["memory"]
    assert memory.pop("warning") is None
    assert memory.pop("fits") and memory.pop("available") == 80
    assert memory.pop("activations_kept") == memory["activations"]
    assert memory.pop("activations_recomputed") < memory["activations"]
    assert memory.pop("total") == pytest.approx(sum(memory.values()))
    [row] = json.loads(cli("plan", "llama3_clm", "-c", "p4d", "-n", "1", "--json").out)["plans"]
    assert row["memory"]["warning"].endswith("try --set train.gradient_checkpointing=true")
    assert memory.keys() == {
        "parameters", "gradients", "optimizer", "gathered", "activations", "runtime",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "cluster", "settings", "advice"),
    [
        ("gpt2_zero1", "trn1", ["batch.micro_batch=4"], "--set batch.micro_batch=1"),
        ("bert_pretrain", "trn1", ["batch.micro_batch=128"], "--set batch.micro_batch=32"),
        (
            "gpt2_zero1", "trn1",
            ["batch.micro_batch=8", "train.gradient_checkpointing=false"],
            "--set batch.micro_batch=1 --set train.gradient_checkpointing=true",
        ),
        (
            "bert_pretrain", "trn1",
            ["model.num_hidden_layers=48", "batch.micro_batch=1", "seq_len=512"],
            "--set train.zero1=true",
        ),
        ("gpt2_zero1", "trn1", ["model.n_layer=52"], "4 nodes"),
        ("gpt2_zero1", "trn1", ["model.n_layer=56"], "devices with more memory"),
        (
            "llama3_clm", "trn1", ["strategy.name=xla_fsdp", "batch.per_worker=3",
             "batch.micro_batch=3"],
            "--set batch.micro_batch=1 --set train.gradient_checkpointing=true on 8 nodes",
        ),
    ],
)  # fmt: skip
def test_advice_is_the_nearest_setting_that_fits(
    recipe: str, cluster: str, settings: list[str], advice: str
) -> None:
    config = resolve(WORKSPACE, recipe, cluster=cluster, settings=settings)
    said = check_memory(make_spec(config, 1, need_time=False))
    assert said.partition(": try ")[2].split(" or ")[0] == advice
    words = [word for word in advice.split() if "=" in word]
    again = resolve(WORKSPACE, recipe, cluster=cluster, settings=[*settings, *words])
    if words:
        nodes = 8 if advice.endswith(" on 8 nodes") else 1
        assert not check_memory(make_spec(again, nodes, need_time=False))


def test_what_cannot_fit_is_refused_before_anything_is_queued(site, cli, fake_slurm) -> None:
    much = ("--cluster", "trn1", "--set", "model.n_layer=96", "--nodes")
    for command in (("plan",), ("submit", "--yes"), ("render",)):
        done = cli(*command, "gpt2_zero1", *much, "2", "--set", "slurm.time_min=60")
        assert done.code == 1
        assert (
            "gpt2_zero1 (xl): the parameters, gradients and optimizer state of a worker need"
            in done.error
        )
        assert "more than the 16 GiB available on trn1.32xlarge: try " in done.error
    assert not fake_slurm.calls("sbatch")


def test_submit_warns_of_what_may_not_fit(site, cli) -> None:
    tight = ("--set", "batch.micro_batch=4", "--cluster", "trn1", "--time", "60")
    done = cli("submit", "gpt2_zero1", *tight, "--dry-run")
    assert "warning: a worker is estimated to need more than the 16 GiB" in done.err


def test_pages_say_of_llama_on_trainium_what_the_plan_says() -> None:
    counts = (1, 2, 4, 8, 16)
    assert all(memory_of("llama3_clm", "trn1", "trn1", nodes=n).fits for n in counts)
    fit = [n for n in counts if memory_of("llama3_clm", "trn1_fsdp", "trn1", nodes=n).fits]
    assert fit == [n for n in counts if n >= fit[0]]
    for page in ("docs/llama3_clm.md", "jobs/llama3_clm/recipe.yaml"):
        text = " ".join((ROOT / page).read_text().replace("#", "").split())
        said = re.findall(r"(\d+) (?:or more trn1\.32xlarge nodes|nodes of trn1\.32xlarge)", text)
        assert said == [str(fit[0])], page
    assert not any(memory_of("llama3_clm", "xla_fsdp", "trn1", nodes=n).fits for n in counts)


def test_a_group_on_one_trn1_needs_what_aws_fits_there() -> None:
    # AWS's sample (tp_zero1_llama3_8B_hf_pretrain.sh) runs on any number of them and recomputes the
    # attention. With all kept it is as much as the device has, with all recomputed far less.
    recomputed, kept = (
        memory_of("llama3_clm", "trn1", "trn1", f"train.gradient_checkpointing={value}")
        for value in ("true", "false")
    )
    assert recomputed.total < 8 and 15 < kept.total < 17
    # 8.03e9 / 32, and 3/4 of what keys and values would be without copies, in 16 and 32 bits.
    copies = 32 * 2 * 4096 * 1024 * (1 / 8 - 1 / 32)
    held = 8_030_261_248 / 32 + copies
    assert recomputed.parameters == pytest.approx(2 * held / 2**30, rel=2e-3)  # and norms
    assert recomputed.gradients == 2 * recomputed.parameters
    assert recomputed.optimizer == 12 * 8_030_261_248 / 32 / 2**30


@pytest.mark.parametrize(
    ("cluster", "settings", "larger"),
    [
        ("p5en", [], 2),
        ("p4d", [], None),  # no room
        ("p5en", ["batch.global_batch=8"], None),  # each worker has one micro-batch
    ],
)
def test_half_empty_devices_could_take_a_larger_micro_batch(
    cluster: str, settings: list[str], larger: int | None
) -> None:
    config = resolve(WORKSPACE, "gpt2_zero1", cluster=cluster, preset="xl", settings=settings)
    assert larger_micro_batch(make_spec(config, 1, need_time=False)) == larger


def test_an_optimizer_of_the_jobs_own_counts_as_the_recipe_says_or_not_at_all() -> None:
    where = ("gpt2_zero1", "xl", "p4d", "precision=fp32")
    adamw, muon = memory_of(*where), memory_of(*where, "train.optimizer=muon")
    assert muon.optimizer == pytest.approx(adamw.optimizer * 4.3 / 8)

    config = resolve(
        WORKSPACE, "gpt2_zero1", cluster="p4d", preset="xl", settings=["train.optimizer=muon"]
    )
    unsaid = replace(config, recipe=replace(config.recipe, optimizer_bytes={}))
    spec = make_spec(unsaid, 1, need_time=False)
    assert estimate_memory(spec) is None
    assert why_no_memory(spec).startswith(
        "Memory: unknown, because muon is the job's own optimizer"
    )
    assert not why_no_memory(make_spec(config, 1, need_time=False))
