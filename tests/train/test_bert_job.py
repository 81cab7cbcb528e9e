"""The BERT job: two losses, the same training on any number of workers, what it learns."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertForPreTraining

from trnslurm.train.batch import Unit
from trnslurm.train.clock import Clock
from trnslurm.train.device import TorchDevice
from trnslurm.train.shards import open_shards
from trnslurm.train.shards.reader import IGNORED

from .conftest import JOBS, REPO, tiny_plan
from .launches import Launches, Scenario
from .make_shards import make_shards
from .measures import import_job

JOB = JOBS / "bert_pretrain"
SIZES = [37, 5, 22]
STEPS = 10  # of 8 samples: into the second pass over all 64
SHAPE = {"steps": STEPS, "train__eval_every": 5, "train__save_every": 0}
# Clipping is active in every step; and unlike Adam, SGD sees a wrong scale of the gradients.
SGD = SHAPE | {
    "train__optimizer": "sgd",
    "train__lr": 0.3,
    "train__schedule": "constant",
    "train__max_norm": 0.5,
}
SAVED = SHAPE | {"train__save_every": 3}
ON_XLA = {"train__stop_at": 4}
# Random numbers differ between XLA and PyTorch.
NO_DROPOUT = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0}
NUMBERS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in one launch for each device and number of workers."""
    directory = tmp_path_factory.mktemp("trainings")
    make_shards(directory / "shards", SIZES)
    make_shards(directory / "shards", [20], split="test")
    launches = Launches(directory, directory / "shards", JOB)
    more = {
        4: [Scenario("elastic", SAVED | {"train__stop_at": 5})],
        2: [Scenario("elastic", SAVED), Scenario("plain", NO_DROPOUT | ON_XLA)],
        1: [Scenario("adamw", SHAPE)],
    }
    for workers in (4, 3, 2, 1):
        sgd = [Scenario(f"sgd-{workers}", SGD)] if workers < 4 else []
        launches.launch(workers, *sgd, *more.get(workers, []), device="cpu")
    for workers in (3, 2, 1):
        again = [
            Scenario("resumed", SAVED | {"train__stop_at": 3}),
            Scenario("resumed", SAVED | ON_XLA),
            Scenario("on-xla", NO_DROPOUT | ON_XLA),
            Scenario("zero1", NO_DROPOUT | ON_XLA | {"train__zero1": True}),
        ]
        launches.launch(
            workers,
            Scenario(f"xla-sgd-{workers}", SGD | ON_XLA),
            Scenario(f"xla-adamw-{workers}", SHAPE | ON_XLA),
            *(again if workers == 2 else []),
        )
    return launches


def assert_same(outcome, other, tolerance=1e-5):
    for key in NUMBERS:
        assert outcome.column(key) == pytest.approx(other.column(key), rel=tolerance), key


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", ["sgd", "xla-sgd"])
def test_losses_norms_and_samples_do_not_depend_on_the_worker_count(trainings, kind, workers):
    one, outcome = trainings.outcome(f"{kind}-1"), trainings.outcome(f"{kind}-{workers}")

    assert_same(outcome, one)
    assert outcome.ledger == one.ledger
    steps = STEPS if kind == "sgd" else 4
    assert [place for place, _ in outcome.ledger] == list(range(steps * 8))
    assert min(one.column("grad_norm")) > 0.5, "clipping is not always active"
    for key in ("eval_loss", "eval_mlm_accuracy", "perplexity"):
        evaluated = [[line[key] for line in o.metrics if key in line] for o in (one, outcome)]
        assert len(evaluated[0]) == (3 if kind == "sgd" else 2)
        assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)


def test_stopped_on_4_workers_in_the_middle_of_a_shard_and_resumed_on_2(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("adamw")

    assert {line["attempt"] for line in outcome.metrics} == {1, 2}
    assert_same(outcome, whole, 1e-4)
    assert outcome.ledger == whole.ledger


def test_a_pass_has_every_sample_once(trainings):
    read = [sample for _, sample in trainings.outcome("adamw").ledger]

    assert len(set(read[: sum(SIZES)])) == len(set(read)) == sum(SIZES)
    assert read[: STEPS * 8 - sum(SIZES)] != read[sum(SIZES) :]


def test_on_xla_a_resumed_training_is_the_same_and_has_no_more_graphs(trainings):
    resumed, whole = trainings.outcome("resumed"), trainings.outcome("xla-adamw-2")

    for key in NUMBERS:
        assert resumed.column(key) == whole.column(key)
    assert resumed.results[0]["parameters"] == whole.results[0]["parameters"]
    for workers in (1, 2, 3):
        graphs = trainings.outcome(f"xla-adamw-{workers}").column("graphs")
        assert graphs[-1] == graphs[1]
    # The save of its third step, and the first step after it, had no graph of their own.
    graphs = resumed.column("graphs")
    assert graphs[1:] == [graphs[1]] * 3


def test_xla_zero1_and_pytorch_agree(trainings):
    plain = trainings.outcome("plain")

    for name in ("on-xla", "zero1"):
        assert_same(trainings.outcome(name), plain, 5e-5)


def test_where_zero1_is_off_every_worker_has_the_whole_state(trainings):
    [whole] = [result["state_bytes"] for result in trainings.outcome("xla-adamw-1").results]
    parts = [result["state_bytes"] for result in trainings.outcome("xla-adamw-3").results]
    assert parts == [whole] * 3
    halves = [result["state_bytes"] for result in trainings.outcome("zero1").results]
    assert max(halves) < 0.6 * whole


@pytest.fixture(scope="module")
def job():
    return import_job(JOB / "train.py")


@pytest.fixture
def run(job, tmp_path):
    """What unit_loss works with, on a CPU by itself."""
    device = object.__new__(TorchDevice)
    device.name, device.rank, device.world, device.clock = "cpu", 0, 1, Clock()
    device.torch_device = torch.device("cpu")
    device.barrier = lambda name: None
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB))
    make_shards(tmp_path / "shards", [9])
    text = open_shards(
        tmp_path / "shards", "train", beside=tmp_path, device=device, seq_len=32, max_pred=5,
        vocab_size=512, seed=1,
    )  # fmt: skip
    settings = SimpleNamespace(init_from="")
    model = job.make_model(plan, settings, device).eval()
    return SimpleNamespace(plan=plan, device=device, model=model, text=text)


def test_the_loss_is_that_of_transformers(job, run):
    samples = run.text.samples(0, 9)
    labels = torch.full_like(samples.input_ids, IGNORED)
    rows, places = torch.nonzero(samples.labels != IGNORED, as_tuple=True)
    labels[rows, samples.positions[rows, places]] = samples.labels[rows, places]
    expected = run.model(
        input_ids=samples.input_ids,
        attention_mask=samples.input_mask,
        token_type_ids=samples.segment_ids,
        labels=labels,
        next_sentence_label=samples.next_sentence,
    )
    counts = (run.text.masked_tokens(0, 9), 9)
    units = [(0, 4), (4, 5)]
    found = sum(
        job.unit_loss(run, run.text, Unit(index=0, first=a, size=n, weight=1.0, seed=1), counts)
        for a, n in units
    )
    assert found[0].item() == pytest.approx(expected.loss.item(), rel=1e-6)
    right = (expected.prediction_logits.argmax(-1) == labels)[labels != IGNORED]
    assert found[3].item() == pytest.approx(right.float().mean().item())


def test_the_output_layer_and_its_bias_are_tied(run):
    names = [name for name, _ in run.model.named_parameters()]
    head = run.model.cls.predictions
    assert head.decoder.bias is head.bias
    assert head.decoder.weight is run.model.bert.embeddings.word_embeddings.weight
    assert not [name for name in names if "decoder" in name]


def test_masked_words_and_next_sentences_are_learnt(tmp_path):
    """Far below the entropy of words and of labels, which is all that they say by themselves."""
    words = 16
    make_shards(tmp_path / "shards", [700, 811], vocab_size=5 + words)
    changes = {
        "model__vocab_size": 5 + words, "model__initializer_range": 0.05, "steps": 160,
        "batch__global_batch": 32, "batch__micro_batch": 32, "train__eval_every": 0,
        "train__save_every": 0, "train__log_every": 10, "train__lr": 2e-3, "train__beta2": 0.98,
    }  # fmt: skip
    launches = Launches(tmp_path, tmp_path / "shards", JOB)
    launches.launch(1, Scenario("learnt", changes | NO_DROPOUT), device="cpu")

    outcome = launches.outcome("learnt")
    assert sum(outcome.column("mlm_loss")[-10:]) / 10 < 0.2 * math.log(words)
    assert sum(outcome.column("nsp_loss")[-10:]) / 10 < 0.5 * math.log(2)


def test_a_checkpoint_becomes_a_folder_of_hugging_face(trainings):
    run_dir = trainings.directory / "elastic"
    plans = sorted(run_dir.glob("plan-*.json"))
    (run_dir / "plan.json").write_text(plans[-1].read_text())
    done = subprocess.run(
        [sys.executable, str(JOB / "export.py"), "plan.json", "--json"],
        cwd=run_dir, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = json.loads(done.stdout)["directory"]
    whole = BertForPreTraining.from_pretrained(folder)
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(masked.cls.predictions.bias, whole.cls.predictions.bias)
    assert whole.cls.predictions.bias.abs().sum() > 0
