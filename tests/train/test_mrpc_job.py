"""BERT's fine-tuning by Hugging Face's Trainer: the same on any number of workers, and its answers
to the known issues of AWS's tutorial."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trnslurm.train import trainer
from trnslurm.train.classifier import read_unit
from trnslurm.train.data.labelled import LabelledSamples, open_labelled
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.device import Timer
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.scores import score

from . import launches
from .conftest import JOBS, lone_device, prepare_data, tiny_plan
from .launches import (
    NO_DROPOUT,
    Launches,
    Scenario,
    assert_bitwise,
    assert_same,
    assert_samples,
)
from .measures import import_job

pytestmark = pytest.mark.rest

JOB = JOBS / "bert_mrpc"
SMALL_DATA = ("--tokenizer=train:512", "--seq-len=32")
STEPS = 9  # of 8 samples: into the second pass over all 64
# Four units of two samples: three workers have two of padding. Dropout is on.
SHAPE = launches.SMALL | {
    "steps": STEPS, "batch__global_batch": 8, "batch__micro_batch": 2, "train__eval_every": 4,
    "train__log_every": 3, "train__save_every": 0, "train__warmup_steps": 2,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__warmup_steps": 0, "train__max_norm": 0.05}
SAVED = SHAPE | {"train__save_every": 3}
FROZEN = SAVED | {"train__optimizer": "lamb", "train__stop_at": 4}
MIXED = SHAPE | {"precision": "mixed", "train__stop_at": 3}
MNLI = SHAPE | {"train__stop_at": 2, "train__eval_every": 2, "model__num_labels": 3}
KEYS = ("loss", "grad_norm", "lr", "eval_loss", "eval_accuracy", "eval_f1")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in as few launches as there are numbers of workers."""
    directory = tmp_path_factory.mktemp("trainings")
    made = Launches(directory, prepare(directory), JOB)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("USE_TORCH_XLA", "0")  # the recipe's `env`
        made.launch(
            3,
            Scenario("sgd-3", SGD),
            Scenario("elastic", SAVED | {"train__stop_at": 5}),
            Scenario("frozen", FROZEN | {"train__stop_at": 2}, "frozen"),
            device="cpu",
        )
        made.launch(
            2,
            Scenario("elastic", SAVED),
            Scenario("frozen", FROZEN, "frozen"),
            Scenario("sgd-2", SGD, change="without_trainers_own"),
            Scenario("resumed", SAVED | {"train__stop_at": 4}),
            Scenario("resumed", SAVED),
            Scenario("adamw-2", SHAPE),
            Scenario("sgd-on-cpu", SGD | NO_DROPOUT),
            Scenario("adamw-on-cpu", SHAPE | NO_DROPOUT),
            Scenario("mixed", MIXED | NO_DROPOUT),
            device="cpu",
        )
        made.launch(
            1,
            Scenario("sgd-1", SGD),
            Scenario("frozen-1", FROZEN, "frozen"),
            Scenario("adamw-1", SHAPE | {"train__epochs": 1}),
            Scenario("mnli", MNLI | {"data": str(prepare_mnli(directory))}),
            device="cpu",
        )
        cache = {"path": "cache", "readonly": False}
        environment.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
        trial = Scenario("trial", SHAPE | NO_DROPOUT, "without_trainers_own", "precompile")
        made.launch(2, trial, cache=cache)
        environment.delenv("NEURON_EXTRACT_GRAPHS_ONLY")
        made.launch(
            2,
            Scenario("adamw-on-xla", SHAPE | NO_DROPOUT),
            Scenario("sgd-on-xla", SGD | NO_DROPOUT),
            cache=cache | {"readonly": True},
        )
    return made


def prepare(directory):
    """Make samples of some of the pairs that come with the job."""
    rows = (JOB / "pairs.csv").read_text().splitlines(keepends=True)
    (directory / "pairs.csv").write_text("".join(rows[:81]))
    texts = ("--text-column", "sentence1", "--text-column", "sentence2")
    words = ("--text", directory / "pairs.csv", *texts, "--task", "mrpc", "--holdout", 0.2)
    return prepare_data(directory / "prepared", "labelled", *SMALL_DATA, *words)


def prepare_mnli(directory):
    """Make samples of a dataset with MNLI's splits, of whose labels nothing is to be learnt."""
    dataset = directory / "mnli"
    dataset.mkdir()
    for split, rows in (("train", 24), ("validation_matched", 6), ("validation_mismatched", 9)):
        lines = [
            json.dumps({"premise": f"{split} {n}", "hypothesis": f"not {n}", "label": n % 3})
            for n in range(rows)
        ]
        (dataset / f"{split}.jsonl").write_text("\n".join(lines))
    words = ("--dataset", dataset, "--task", "mnli")
    return prepare_data(directory / "mnli-prepared", "labelled", *SMALL_DATA, *words)


@pytest.mark.parametrize("workers", [2, 3])
def test_losses_norms_scores_and_samples_do_not_depend_on_the_worker_count(trainings, workers):
    one, outcome = trainings.outcome("sgd-1"), trainings.outcome(f"sgd-{workers}")

    assert_same(outcome, one, KEYS)
    assert_samples(outcome, one, STEPS * 8, 0.05)
    assert [line["step"] for line in one.metrics if "eval_f1" in line] == [1, 4, 8, 9]


def test_frozen_embeddings_stay_and_lamb_trains_the_rest(trainings):
    assert_same(trainings.outcome("frozen"), trainings.outcome("frozen-1"), KEYS[:3])
    [(_, first), (manifest, last)] = trainings.saved("frozen")
    assert (manifest.step, manifest.workers) == (4, 2)
    for name, tensor in last.items():
        assert torch.equal(tensor, first[name]) == (".embeddings." in name), name
        assert (name in manifest.frozen) == (".embeddings." in name)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_xla_as_on_pytorch(trainings, optimizer):
    plain = trainings.outcome(f"{optimizer}-on-cpu")

    assert_same(trainings.outcome(f"{optimizer}-on-xla"), plain, KEYS, 1e-4)


@pytest.mark.matrix
def test_on_xla_with_one_worker_as_well(trainings, monkeypatch):
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    trainings.launch(1, Scenario("sgd-on-xla-1", SGD | NO_DROPOUT))

    assert_same(trainings.outcome("sgd-on-xla-1"), trainings.outcome("sgd-on-cpu"), KEYS, 1e-4)


def test_a_trial_of_three_steps_has_seen_every_graph_the_second_epochs_too(trainings):
    """AWS's tutorial meets new graphs at the end of an epoch, unless both runs have as many."""
    trainings.assert_trial_saw_every_graph("trial", "adamw-on-xla")
    read = [sample for _, sample in trainings.outcome("adamw-on-xla").ledger]
    assert len(set(read[:64])) == len(set(read)) == 64


def test_a_trial_scores_nothing_and_needs_nothing_of_trainers_evaluation(trainings):
    """What it predicts is nothing: "Target is multiclass but average='binary'"."""
    [trial] = [output for output in trainings.outputs if "losses above are invalid" in output]
    assert "step 3/3" in trial and "eval" not in trial
    assert not (trainings.directory / "trial" / "metrics.jsonl").exists()
    # A training without any of it, too: of neither was anything called.
    assert trainings.outcome("sgd-2").column("step") == list(range(1, STEPS + 1))


def test_stopped_on_3_workers_and_resumed_on_2(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("adamw-2")

    assert {line["attempt"] for line in outcome.metrics} == {1, 2}
    assert outcome.column("step") == list(range(1, STEPS + 1))
    assert_same(outcome, whole, rel=1e-4)
    assert outcome.ledger == whole.ledger


def test_resumed_on_as_many_workers_it_is_bitwise_the_same(trainings):
    keys = ("loss", "grad_norm", "lr")
    assert_bitwise(trainings.outcome("resumed"), trainings.outcome("adamw-2"), keys)


def test_the_rate_is_the_recipes_and_an_epoch_ends_it(trainings):
    assert trainings.outcome("adamw-1").column("lr") == pytest.approx(
        [0.0015, 0.003, *(0.003 * (1 - step / 6) for step in range(6))]
    )


def test_mnlis_second_split_is_scored_by_itself(trainings):
    [first, last] = trainings.outcome("mnli").metrics
    for line in (first, last):
        assert line["eval_accuracy"] * 6 == pytest.approx(round(line["eval_accuracy"] * 6))
        mismatched = line["eval_mismatched_accuracy"] * 9
        assert mismatched == pytest.approx(round(mismatched))
        assert line["eval_mismatched_loss"] not in (line["eval_loss"], line["loss"])
        assert not [key for key in line if key.endswith("_f1")]


def test_bf16_arithmetic_needs_no_gpu(trainings):
    mixed, plain = trainings.outcome("mixed"), trainings.outcome("adamw-on-cpu")
    assert mixed.column("loss") != plain.column("loss")[:3]
    assert_same(mixed, plain, ["loss"], 2e-2)


def test_a_checkpoint_becomes_a_folder_of_hugging_face(trainings, run_export):
    out, err = run_export(JOB, trainings.directory / "elastic", "--json")
    assert err == ""
    folder = json.loads(out)["directory"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = open_labelled(trainings.data, "eval", seq_len=32, vocab_size=512, seed=1)
    ids = text.fixed(0, 1).input_ids[0]
    first, second = tokenizer.decode(ids).removeprefix("[CLS] ").split(" [SEP] ")[:2]
    again = tokenizer(first, second, padding="max_length", max_length=32, return_tensors="pt")
    assert torch.equal(again.input_ids[0], ids)
    assert again.token_type_ids.tolist() == text.fixed(0, 1).token_type_ids.tolist()
    assert model(**again).logits.shape == (1, 2)


@pytest.fixture(scope="module")
def job():
    return import_job(JOB / "train.py")


@pytest.mark.parametrize("labels", [(), ("a", "b", "c")])
def test_the_loss_is_that_of_transformers(job, labels):
    outputs = len(labels) or 1
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB, model__num_labels=outputs))
    plan.batch = SimpleNamespace(global_batch=6)
    device = lone_device()
    model = job.make_classifier(plan, "", device).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (6, 32), generator=generator)
    samples = {
        "input_ids": ids, "token_type_ids": (ids > 250).long(), "attention_mask": (ids > 50).long(),
        "labels": torch.tensor([0, 1, 2, 2, 1, 0]) if labels else torch.rand(6),
    }  # fmt: skip
    text = SimpleNamespace(samples=lambda first, count: LabelledSamples(
        **{key: value[first : first + count] for key, value in samples.items()}
    ))  # fmt: skip
    found = sum(
        job.unit_loss(
            model, device, plan, text, Unit(index=0, first=first, size=size, weight=1.0, seed=1)
        )
        for first, size in ((0, 2), (2, 4))
    )
    assert found.tolist() == pytest.approx([model(**samples).loss.item()], rel=1e-5)


def test_numbers_on_a_scale_are_scored_by_correlation():
    text = SimpleNamespace(
        labels=(), num_outputs=1, metrics=("pearson", "spearman"),
        fixed=lambda first, count: SimpleNamespace(labels=torch.tensor([1.0, 2.0, 4.0])),
    )  # fmt: skip
    scores = score(text, torch.tensor([[2.0], [3.0], [5.0]]))
    assert scores == pytest.approx({"loss": 1.0, "pearson": 1.0, "spearman": 1.0})


def test_torch_xla_in_trainers_hands_is_refused(monkeypatch):
    monkeypatch.setattr(trainer, "is_torch_xla_available", lambda: True)
    with pytest.raises(TrainError, match="set USE_TORCH_XLA=0 in the environment"):
        trainer._check_libraries()
    monkeypatch.setattr(trainer, "is_accelerate_available", lambda: False)
    with pytest.raises(TrainError, match="needs accelerate: run pip install accelerate=="):
        trainer._check_libraries()


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (1, 1)])
def test_two_silent_copies_are_refused(workers, rank):
    """Accelerate's own idea of the world, held against ours."""
    alone = SimpleNamespace(num_processes=1, process_index=0)
    run = SimpleNamespace(device=SimpleNamespace(rank=rank), plan=SimpleNamespace(workers=workers))
    seen = SimpleNamespace(accelerator=alone, _run=run)
    with pytest.raises(TrainError, match=f"sees worker 0 of 1, but this is {rank} of {workers}: "):
        trainer.UnitTrainer._check_world(seen)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 16}, "seq_len is 16, but the samples of .* have 32"),
        ({"model__num_labels": 3}, "has not_equivalent, equivalent: set model.num_labels=2"),
        ({"model__vocab_size": 9}, "model.vocab_size is 9, but .* tokens up to "),
    ],
)
def test_data_that_does_not_fit_is_refused(job, trainings, changes, words):
    changes = {"data": str(trainings.data)} | changes
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB, **changes))
    with pytest.raises(TrainError, match=words):
        job.open_split(plan, "train")


def test_reading_a_unit_counts_as_data():
    """Not only its copy to the device, which on CPUs is none."""
    device = SimpleNamespace(timer=Timer(), put_all=list)
    names = LabelledSamples._fields
    doing = []

    class Text:
        def samples(self, first, size):
            doing.append(device.timer.doing)
            return LabelledSamples(**dict.fromkeys(names, torch.arange(first, first + size)))

    read = read_unit(device, Text(), Unit(index=0, first=3, size=2, weight=1.0, seed=0))
    assert doing == ["data"] and read.labels.tolist() == [3, 4]
    assert list(device.timer.take()) == ["data"]
