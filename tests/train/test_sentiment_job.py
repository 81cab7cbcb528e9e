"""The job of sentiments: the same on any number of workers, its scores, the best it keeps."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trnslurm.train.checkpoint.reading import find_best, prove
from trnslurm.train.data.labelled import open_labelled
from trnslurm.train.errors import TrainError
from trnslurm.train.loop import job as opening
from trnslurm.train.loop.run import TrainingRun

from . import launches
from .conftest import JOBS, lone_device, prepare_data, tiny_plan
from .launches import Launches, Scenario, assert_same, assert_samples
from .measures import import_job

pytestmark = pytest.mark.rest

JOB = JOBS / "bert_sentiment"
LABELS = ["negative", "neutral", "positive"]
STEPS = 10
# Four units of two samples: three workers have two of padding. They go into the second pass, and an
# odd number is held out. Dropout is on.
SHAPE = launches.SMALL | {
    "seq_len": 16, "steps": STEPS, "batch__global_batch": 8, "batch__micro_batch": 2,
    "train__log_every": 1, "train__eval_every": 5, "train__save_every": 0,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.1}
STEADY = SGD | launches.NO_DROPOUT
# At such a rate the last is not the best.
WORSE = SHAPE | {
    "train__lr": 0.1, "train__schedule": "constant", "train__eval_every": 1, "train__save_every": 1,
    "train__keep_best": "loss",
}  # fmt: skip
KEYS = ("loss", "accuracy", "grad_norm", "eval_loss", "eval_accuracy", "eval_macro_f1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepare the first of the job's tweets."""
    directory = tmp_path_factory.mktemp("tweets")
    rows = (JOB / "tweets.csv").read_text().split('"\n"')[:61]
    (directory / "some.csv").write_text('"\n"'.join(rows) + '"\n')
    words = ("--text", directory / "some.csv", "--label-column=labels", "--tokenizer=train:200")
    return prepare_data(directory / "data", "labelled", *words, "--seq-len=16", "--holdout=0.2")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, data):
    """Every training of this file, in as few launches as there are numbers of workers."""
    made = Launches(tmp_path_factory.mktemp("trainings"), data, JOB)
    cache = {"path": "cache", "readonly": False}
    made.launch(2, Scenario("trial", STEADY, phase="precompile"), cache=cache)
    made.launch(2, Scenario("on-xla", STEADY), cache=cache | {"readonly": True})
    made.launch(1, Scenario("cpu-1", SGD), Scenario("plain", STEADY), device="cpu")
    made.launch(3, Scenario("cpu-3", SGD), Scenario("worse", WORSE), device="cpu")
    return made


@pytest.fixture(scope="module")
def on_xla(trainings):
    """On any number of workers; each has graphs of its own to compile."""
    for workers in (1, 2, 3):
        trainings.launch(workers, Scenario(f"xla-{workers}", SGD))
    return trainings


def test_nothing_depends_on_the_worker_count(trainings):
    assert_all_same(trainings.outcome("cpu-3"), trainings.outcome("cpu-1"))


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_depends_on_the_worker_count_on_xla(on_xla, workers):
    assert_all_same(on_xla.outcome(f"xla-{workers}"), on_xla.outcome("xla-1"))


def assert_all_same(outcome, one):
    assert_same(outcome, one, KEYS)
    assert len(outcome.column("eval_loss")) == 3
    assert_samples(outcome, one, STEPS * 8, 0.1)


def test_a_trial_of_three_steps_has_seen_every_graph(trainings):
    trainings.assert_trial_saw_every_graph("trial", "on-xla")


def test_xla_and_pytorch_agree(trainings):
    assert_same(trainings.outcome("on-xla"), trainings.outcome("plain"), KEYS, 5e-5)


def test_the_best_is_kept_and_exported_with_the_names_of_its_labels(trainings, data, run_export):
    losses = trainings.outcome("worse").column("eval_loss")
    best = losses.index(min(losses)) + 1
    run_dir = trainings.directory / "worse"
    kept = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())
    assert kept == sorted({best, STEPS - 1, STEPS})
    checkpoint = find_best(run_dir / "checkpoints")
    assert prove(checkpoint).score == {"loss": pytest.approx(min(losses))}

    out, err = run_export(JOB, run_dir, "--step", "best", "--json")
    assert err == ""
    said = json.loads(out)
    assert said["step"] == best
    model = AutoModelForSequenceClassification.from_pretrained(said["directory"]).eval()
    assert model.config.id2label == dict(enumerate(LABELS))
    tokenizer = AutoTokenizer.from_pretrained(said["directory"])
    held_out = open_labelled(data, "eval", seq_len=16, vocab_size=512, seed=1)
    samples = held_out.fixed(0, held_out.num_samples)
    texts = tokenizer.batch_decode(samples.input_ids, skip_special_tokens=True)
    encoded = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
    assert torch.equal(encoded.input_ids, samples.input_ids)
    loss = model(**encoded, labels=samples.labels).loss.item()
    assert loss == pytest.approx(min(losses), rel=1e-5)


@pytest.fixture(scope="module")
def job():
    return import_job(JOB / "train.py")


class BegunError(Exception):
    """A job has made everything, and would now train."""


@pytest.fixture
def alone(job, data, tmp_path, monkeypatch):
    """Start the job as one worker, without others to talk to, up to its first step."""
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(opening, "open_device", lambda name, environment: lone_device())
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TRNSLURM_PHASE", "precompile")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(int("WORLD" in name)))
    made = SimpleNamespace()

    def begin(run):
        made.run = run
        raise BegunError

    def note(name):
        real = getattr(job, name)

        def noted(*args):
            result = real(*args)
            setattr(made, args[-1] if name == "open_texts" else "model", result)
            return result

        monkeypatch.setattr(job, name, noted)

    monkeypatch.setattr(TrainingRun, "begin", begin)
    note("open_texts")
    note("make_classifier")

    def make(**changes):
        shape = SHAPE | {"data": str(data)} | changes
        (tmp_path / "plan.json").write_text(json.dumps(tiny_plan("cpu", 1, 1, job=JOB, **shape)))
        monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "plan.json")])
        with contextlib.suppress(BegunError):
            job.main()
        return made

    return make


@pytest.mark.parametrize("wanted", [0, 5])
def test_held_out_samples_count_once_each(job, alone, wanted):
    made = alone(train__eval_samples=wanted)
    count = wanted or made.eval.num_samples
    assert count % 2 == 1
    samples = made.eval.fixed(0, count)
    made.model.eval()
    expected = made.model(
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        token_type_ids=samples.token_type_ids,
        labels=samples.labels,
    )
    found = job.evaluate(made.run, made.model, made.run.settings, made.eval)
    assert found["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    right = (expected.logits.argmax(-1) == samples.labels).double().mean().item()
    assert found["eval_accuracy"] == pytest.approx(right)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 32}, "seq_len is 32, but "),
        ({"model__vocab_size": 100}, "model.vocab_size is 100, but "),
        (
            {"model__num_labels": 2},
            "model.num_labels is 2, but .* has negative, neutral, positive: set",
        ),
        ({"train__keep_best": "f1"}, "train.keep_best is 'f1', but it must be loss, accuracy, mac"),
    ],
)
def test_what_cannot_be_is_one_line(alone, changes, words):
    with pytest.raises(TrainError, match=words) as error:
        alone(**changes)
    assert "\n" not in str(error.value)


def test_labels_on_a_scale_are_of_another_job(alone, data, tmp_path):
    index = json.loads((data / "index.json").read_text())
    for path in data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "index.json").unlink()
    (tmp_path / "index.json").write_text(json.dumps(index | {"labels": []}))
    with pytest.raises(
        TrainError, match="its labels are numbers on a scale: use the recipe bert_mrpc"
    ):
        alone(data=str(tmp_path), model__num_labels=1)
