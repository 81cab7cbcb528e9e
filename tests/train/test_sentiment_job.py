"""The job of sentiments: the same on any number of workers, its scores, the best it keeps."""

import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trnslurm.train.checkpoint.reading import find_best, prove
from trnslurm.train.data.labelled import open_labelled
from trnslurm.train.devices import store
from trnslurm.train.devices.device import Timer
from trnslurm.train.devices.plain import TorchDevice
from trnslurm.train.errors import TrainError
from trnslurm.train.loop import job as opening
from trnslurm.train.loop.run import TrainingRun

from .conftest import JOBS, REPO, tiny_plan
from .launches import Launches, Scenario
from .measures import import_job

JOB = JOBS / "bert_sentiment"
LABELS = ["negative", "neutral", "positive"]
STEPS = 10
# Four units of two samples: three workers have two of padding. They go into the second pass, and an
# odd number is held out. Compiling takes longest, so the model is small. Dropout is on.
SHAPE = {
    "seq_len": 16, "steps": STEPS, "batch__global_batch": 8, "batch__micro_batch": 2,
    "train__log_every": 1, "train__eval_every": 5, "train__save_every": 0,
    "model__num_hidden_layers": 1, "model__hidden_size": 32, "model__intermediate_size": 64,
}  # fmt: skip
# Clipping is active in every step; and unlike Adam, SGD sees a wrong scale of the gradients.
SGD = SHAPE | {
    "train__optimizer": "sgd",
    "train__lr": 0.3,
    "train__schedule": "constant",
    "train__max_norm": 0.1,
}
# Random numbers differ between XLA and PyTorch.
NO_DROPOUT = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0}
SAVED = SHAPE | {"train__save_every": 5}
# At such a rate the last is not the best.
WORSE = SHAPE | {
    "train__lr": 0.1, "train__schedule": "constant", "train__eval_every": 1, "train__save_every": 1,
    "train__keep_best": "loss",
}  # fmt: skip
NUMBERS = ("loss", "accuracy", "grad_norm")
SCORES = ("eval_loss", "eval_accuracy", "eval_macro_f1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepare the first of the job's tweets."""
    directory = tmp_path_factory.mktemp("tweets")
    rows = (JOB / "tweets.csv").read_text().split('"\n"')[:61]
    (directory / "some.csv").write_text('"\n"'.join(rows) + '"\n')
    words = ["--text", str(directory / "some.csv"), "--output", str(directory / "data")]
    words += ["--label-column=labels", "--tokenizer=train:200", "--seq-len=16", "--holdout=0.2"]
    subprocess.run(
        [sys.executable, "-m", "trnslurm.prepare", "labelled", *words],
        env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    return directory / "data"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, data):
    """Every training of this file, in as few launches as there are numbers of workers."""
    launches = Launches(tmp_path_factory.mktemp("trainings"), data, JOB)
    cache = {"path": "cache", "readonly": False}
    launches.launch(2, Scenario("trial", SGD, phase="precompile"), cache=cache)
    cache = cache | {"readonly": True}
    both = [Scenario("xla-2", SGD), Scenario("on-xla", SHAPE | NO_DROPOUT)]
    launches.launch(2, *both, cache=cache)
    launches.launch(1, Scenario("cpu-1", SGD), device="cpu")
    launches.launch(
        3, Scenario("cpu-3", SGD), Scenario("elastic", SAVED | {"train__stop_at": 5}), device="cpu"
    )
    launches.launch(
        2,
        Scenario("elastic", SAVED),
        Scenario("whole", SHAPE),
        Scenario("plain", SHAPE | NO_DROPOUT),
        Scenario("worse", WORSE),
        device="cpu",
    )
    return launches


@pytest.fixture(scope="module")
def on_xla(trainings):
    """On other numbers of workers too; each has graphs of its own to compile."""
    for workers in (1, 3):
        trainings.launch(workers, Scenario(f"xla-{workers}", SGD))
    return trainings


def assert_same(outcome, other, tolerance):
    for key in NUMBERS:
        assert outcome.column(key) == pytest.approx(other.column(key), rel=tolerance), key
    for key in SCORES:
        found, wanted = ([line[key] for line in o.metrics if key in line] for o in (outcome, other))
        assert len(wanted) >= 3
        assert found == pytest.approx(wanted, rel=tolerance), key


def test_nothing_depends_on_the_worker_count(trainings):
    assert_all_same(trainings.outcome("cpu-3"), trainings.outcome("cpu-1"))


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_depends_on_the_worker_count_on_xla(on_xla, workers):
    assert_all_same(on_xla.outcome(f"xla-{workers}"), on_xla.outcome("xla-1"))


def assert_all_same(outcome, one):
    assert_same(outcome, one, 1e-5)
    assert outcome.ledger == one.ledger
    assert [place for place, _ in outcome.ledger] == list(range(STEPS * 8))
    assert min(one.column("grad_norm")) > 0.1, "clipping is not always active"


def test_a_trial_of_three_steps_has_seen_every_graph(trainings):
    assert all(result["misses"] > 0 for result in trainings.results("trial"))
    assert [result["misses"] for result in trainings.results("xla-2")] == [0, 0]
    graphs = trainings.outcome("xla-2").column("graphs")
    assert graphs[-1] == graphs[1], "graphs after the second step"


def test_xla_and_pytorch_agree(trainings):
    assert_same(trainings.outcome("on-xla"), trainings.outcome("plain"), 5e-5)


def test_stopped_on_3_workers_and_resumed_on_2(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("whole")

    assert outcome.column("attempt") == [1] * 5 + [2] * 5
    for key in NUMBERS:
        assert outcome.column(key) == pytest.approx(whole.column(key), rel=1e-4)
    assert outcome.ledger == whole.ledger


def test_the_best_is_kept_and_exported_with_the_names_of_its_labels(trainings, data):
    losses = trainings.outcome("worse").column("eval_loss")
    best = losses.index(min(losses)) + 1
    run_dir = trainings.directory / "worse"
    kept = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())
    assert kept == sorted({best, STEPS - 1, STEPS})
    checkpoint = find_best(run_dir / "checkpoints")
    assert prove(checkpoint).score == {"loss": pytest.approx(min(losses))}

    (run_dir / "plan-1.json").rename(run_dir / "plan.json")
    done = subprocess.run(
        [sys.executable, str(JOB / "export.py"), "plan.json", "--step", "best", "--json"],
        cwd=run_dir, env=os.environ | {"PYTHONPATH": str(REPO), "USE_TORCH_XLA": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
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
    monkeypatch.setattr(store, "_connect", dist.HashStore)
    device = object.__new__(TorchDevice)
    device.name, device.rank, device.world, device.local_world = "cpu", 0, 1, 1
    device.torch_device, device.timer, device.total = torch.device("cpu"), Timer(), list
    monkeypatch.setattr(opening, "open_device", lambda name, environment: device)
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TRNSLURM_PHASE", "precompile")
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
        ({"train__keep_best": "f1"}, "train.keep_best is 'f1', but it can be loss, accuracy, mac"),
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
    with pytest.raises(TrainError, match="its labels are numbers on a scale: train bert_mrpc on"):
        alone(data=str(tmp_path), model__num_labels=1)
