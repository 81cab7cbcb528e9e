"""What a fine-tuning begins with, and what its scripts set: bert_mrpc's, by its own presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.prepare.labelled.tasks import TASKS
from trnslurm.render.job import render_job

WORKSPACE = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
MODEL = "hub/google-bert--bert-large-uncased"
LOCAL = ("bert_mrpc", "--cluster", "local")


def spec_of(preset: str, *settings: str, nodes: int = 1) -> JobSpec:
    config = resolve(WORKSPACE, "bert_mrpc", cluster="trn1", preset=preset, settings=[*settings])
    return make_spec(config, nodes, need_time=False)


def files_of(spec: JobSpec) -> dict[str, str]:
    entry = {"code/jobs/bert_mrpc/train.py": b""}
    files = render_job(spec, WORKSPACE.template_dirs(), code=entry).files
    return {name: data.decode() for name, data in files.items()}


def plan_of(spec: JobSpec) -> Any:
    return json.loads(files_of(spec)["plan.json"])


def test_the_recipes_model_unless_another_is_asked_for(site) -> None:
    root = resolve(WORKSPACE, "bert_mrpc", cluster="trn1").cluster.data_root
    assert plan_of(spec_of("mrpc"))["train"]["init_from"] == f"{root}/{MODEL}"
    given = spec_of("mrpc", "train.init_from=/models/mine")
    assert plan_of(given)["train"]["init_from"] == "/models/mine"
    assert plan_of(spec_of("mrpc", "data.model=null"))["train"]["init_from"] == ""
    assert plan_of(spec_of("tiny", "workers_per_node=1"))["train"]["init_from"] == ""


@pytest.mark.parametrize("task", sorted(TASKS))
def test_each_task_of_glue_has_a_preset_with_its_labels(site, task: str) -> None:
    config = resolve(WORKSPACE, "bert_mrpc", cluster="trn1", preset=task)
    assert config.recipe.data.dataset_config == task
    assert config.recipe.data.path == f"glue-{task}-seqlen128"
    assert config.recipe.model["num_labels"] == (len(TASKS[task].labels) or 1)


@pytest.mark.parametrize(("workers", "accumulation"), [(1, 32), (2, 16), (8, 4), (32, 1)])
def test_one_two_eight_and_32_workers_as_in_the_tutorial(
    site, workers: int, accumulation: int
) -> None:
    grows = spec_of("mrpc", f"workers_per_node={workers}").batch
    assert (grows.global_batch, grows.micro_batch, grows.accumulation) == (8 * workers, 8, 1)
    kept = spec_of("mrpc_fixed", f"workers_per_node={workers}").batch
    assert (kept.global_batch, kept.accumulation, kept.padding_units) == (64, accumulation, 0)


def test_on_a_small_host_a_graph_is_compiled_once(site) -> None:
    retries = "\nexport NEURON_PARALLEL_COMPILE_MAX_RETRIES=1\n"
    small = files_of(spec_of("mrpc", "instance_type=trn1.2xlarge"))
    assert retries in small["precompile.sbatch"]
    assert retries not in small["train.sbatch"]
    assert retries not in files_of(spec_of("mrpc"))["precompile.sbatch"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("precision=fp16", "precision is 'fp16' (did you mean \"bf16\"?); expected one of fp32,"),
        ("data.model=../x", "data.model contains '..', which leads out of its directory"),
        ("batch.padding=never", "batch.padding is 'never'; expected one of allow, refuse"),
    ],
)
def test_bad_values_are_one_line(cli, setting: str, words: str) -> None:
    done = cli("plan", *LOCAL, "--preset", "tiny", "--set", setting)
    assert done.code == 1
    assert words in done.error


def test_what_was_not_fetched_or_is_of_another_kind_is_refused(cli, home: Path) -> None:
    data = home / "trnslurm-data"
    own = (*LOCAL, "--preset", "own")
    fetch = "trnslurm data fetch bert_mrpc --preset own --cluster local"
    rows = home / "rows.csv"
    rows.write_text("text,label\na,0\n")
    refused = cli("data", "prepare", *own, "--input", rows, "--dry-run")
    assert refused.error == f"no model at ~/trnslurm-data/{MODEL}: run {fetch}"

    (data / "own-seqlen128").mkdir(parents=True)
    index = {"kind": "labelled", "seq_len": 128, "vocab_size": 30522, "labels": ["a", "b", "c"]}
    (data / "own-seqlen128" / "index.json").write_text(json.dumps(index))
    assert cli("submit", *own, "--dry-run").error == (
        "model.num_labels is 2, but the data at ~/trnslurm-data/own-seqlen128 has the labels "
        "a, b, c: pass --set model.num_labels=3"
    )
    three = (*own, "--set", "model.num_labels=3", "--dry-run")
    assert cli("submit", *three).error == f"no model at ~/trnslurm-data/{MODEL}: run {fetch}"
    (data / MODEL).mkdir(parents=True)
    (data / MODEL / "config.json").write_text("{}")
    assert cli("submit", *three).code == 0
    assert cli("data", "prepare", *own, "--input", rows, "--dry-run").code == 0


def test_fetch_brings_dataset_tokenizer_and_model(cli, home: Path, monkeypatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        "trnslurm.cli.data.prepare_here",
        lambda cluster, arguments, otherwise: asked.append(list(arguments)) or 0,
    )
    cli("data", "fetch", *LOCAL, "--preset", "rte", "--force")
    cli("data", "fetch", *LOCAL, "--preset", "own")
    hub = "~/trnslurm-data/hub"
    model = ["model", f"--output={hub}/google-bert--bert-large-uncased",
             "--model=google-bert/bert-large-uncased"]  # fmt: skip
    dataset, *models = asked
    assert dataset[0] == "fetch" and "--config=rte" in dataset and "--all-columns" in dataset
    assert models == [[*model, "--force"], model]
