"""The job of words: the same on any number of workers, also RoBERTa, DistilBERT and ALBERT."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from trnslurm.config.models import PUBLISHED
from trnslurm.train.data.labelled import UNLABELLED, open_labelled
from trnslurm.train.data.units import Unit
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.scores import count_words, entity_scores

from ..make_tokenizers import make_tokenizer
from . import launches
from .conftest import JOBS, lone_device, prepare_data, tiny_plan
from .launches import Launches, Scenario, assert_same, assert_samples
from .measures import import_job

pytestmark = pytest.mark.rest

JOB = JOBS / "bert_ner"
STEPS = 6
NAMES = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
# Four units of two samples: three workers have two of padding, and an odd number is held out.
# Units have different numbers of words. Dropout is on.
SHAPE = launches.SMALL | {
    "seq_len": 48, "steps": STEPS, "batch__global_batch": 8, "batch__micro_batch": 2,
    "train__log_every": 1, "train__eval_every": 3, "train__save_every": 0,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.1}
OF_ITS_OWN = ("model_type", "hidden_act", "layer_norm_eps", "pad_token_id", "type_vocab_size")
RELATIVES = {
    "roberta": "roberta-base", "distilbert": "distilbert-base-cased", "albert": "albert-base-v2",
}  # fmt: skip
KEYS = (
    "loss", "accuracy", "grad_norm", "eval_loss", "eval_entity_f1", "eval_entity_recall",
    "eval_accuracy",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepare the first of the job's sentences, for each kind of tokenizer."""
    directory = tmp_path_factory.mktemp("words")
    sentences = (JOB / "sentences.conll").read_text().split("\n\n")[:63]
    (directory / "some.conll").write_text("\n\n".join(sentences))
    labels = [word for name in NAMES for word in ("--label", name)]
    for kind in ("bert", "roberta", "albert"):
        own = make_tokenizer(kind, directory / f"{kind}-tokenizer")
        words = ("--text", directory / "some.conll", "--tokenizer", own, *labels)
        more = ("--task=ner", "--seq-len=48", "--holdout=0.2")
        prepare_data(directory / kind, "labelled", *words, *more)
    return directory


def relative(kind, data):
    """A training of a small model of this type, on tokens of its own."""
    published = PUBLISHED[RELATIVES[kind]][1]
    model = {f"model__{key}": published[key] for key in OF_ITS_OWN}
    model |= {"model__embedding_size": 16 * (kind == "albert")}
    own = data / ("bert" if kind == "distilbert" else kind)
    return Scenario(kind, SGD | model | {"data": str(own), "train__save_every": STEPS})


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, data):
    """Every training of this file, in as few launches as there are numbers of workers."""
    made = Launches(tmp_path_factory.mktemp("trainings"), data / "bert", JOB)
    relatives = [relative(kind, data) for kind in RELATIVES]
    made.launch(1, Scenario("cpu-1", SGD), *relatives, device="cpu")
    for kind in RELATIVES:
        (made.directory / kind).rename(made.directory / f"{kind}-1")
    made.launch(3, Scenario("cpu-3", SGD), *relatives, device="cpu")
    return made


@pytest.mark.parametrize(
    ("name", "one"),
    [("cpu-3", "cpu-1"), *((kind, f"{kind}-1") for kind in RELATIVES)],
)
def test_nothing_depends_on_the_worker_count(trainings, name, one):
    assert_whole(trainings.outcome(name), trainings.outcome(one), 1e-5)


def assert_whole(outcome, one, tolerance):
    assert_same(outcome, one, KEYS, tolerance)
    assert len(outcome.column("eval_loss")) == 3
    assert_samples(outcome, one, STEPS * 8, 0.1)


@pytest.mark.matrix
def test_it_is_the_same_on_xla_and_a_trial_sees_every_graph(trainings, data):
    cache = {"path": "cache", "readonly": False}
    steady = SGD | launches.NO_DROPOUT | {"train__save_every": 0}
    kinds = {kind: relative(kind, data).changes | steady for kind in RELATIVES} | {"bert": steady}
    # ALBERT's and DistilBERT's classifiers have a dropout of their own.
    exact = ("bert", "roberta")
    trials = [Scenario(f"{k}-trial", c, phase="precompile") for k, c in kinds.items()]
    trainings.launch(2, *trials, cache=cache)
    on_xla = [Scenario(f"{kind}-xla", changes) for kind, changes in kinds.items()]
    trainings.launch(2, *on_xla, cache=cache | {"readonly": True})
    trainings.launch(1, *(Scenario(f"{k}-plain", kinds[k]) for k in exact), device="cpu")
    for kind in kinds:
        results = trainings.results(f"{kind}-xla")
        assert [result["misses"] for result in results] == [0, 0], kind
    for kind in exact:
        outcome = trainings.outcome(f"{kind}-xla")
        assert_whole(outcome, trainings.outcome(f"{kind}-plain"), 5e-5)


@pytest.mark.parametrize("kind", RELATIVES)
def test_it_is_exported_as_transformers_reads_it(trainings, data, kind, run_export):
    """The held-out sentences, through its tokenizer and its model, have the loss of the run."""
    out, err = run_export(JOB, trainings.directory / kind, "--json")
    assert err == ""
    folder = json.loads(out)["directory"]
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert model.config.model_type == kind
    assert model.config.id2label == dict(enumerate(NAMES))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prepared = data / ("bert" if kind == "distilbert" else kind)
    held_out = open_labelled(prepared, "eval", seq_len=48, vocab_size=512, seed=1)
    samples = held_out.fixed(0, held_out.num_samples)
    assert held_out.num_samples % 2 == 1
    texts = [s.split("\n") for s in (data / "some.conll").read_text().strip().split("\n\n")]
    sentences = [[line.split()[0] for line in lines] for lines in texts]
    encoded = tokenizer(
        sentences, is_split_into_words=True, padding="max_length", max_length=48,
        truncation=True, return_tensors="pt",
    )  # fmt: skip
    rows = {tuple(ids): row for row, ids in enumerate(encoded.input_ids.tolist())}
    chosen = [rows[tuple(ids)] for ids in samples.input_ids.tolist()]
    with torch.no_grad():
        told = model(**{k: v[chosen] for k, v in encoded.items()}, labels=samples.labels)
    counts = []
    for guess, truth in zip(told.logits.argmax(-1), samples.labels, strict=True):
        of_words = truth != UNLABELLED
        counts.append(count_words(*([NAMES[n] for n in part[of_words]] for part in (guess, truth))))
    expected = entity_scores(
        held_out.metrics, [sum(column) for column in zip(*counts, strict=True)]
    )
    expected["loss"] = told.loss.item()
    last = trainings.outcome(kind).metrics[-1]
    for name, value in expected.items():
        assert last[f"eval_{name}"] == pytest.approx(value, rel=1e-5), name


@pytest.fixture(scope="module")
def job():
    return import_job(JOB / "train.py")


def test_the_loss_is_the_mean_over_the_words_of_the_step(job, data):
    """As transformers computes it of all samples at once, though units have more words or fewer."""
    text = open_labelled(data / "bert", "train", seq_len=48, vocab_size=512, seed=1)
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB, seq_len=48))
    device = lone_device()
    model = job.make_classifier(plan, "", device, of_words=True).eval()
    words = text.labelled_words(8, 8)
    parts = [text.labelled_words(first, 2) for first in range(8, 16, 2)]
    assert sum(parts) == words and len(set(parts)) > 1
    units = [Unit(index=0, first=f, size=2, weight=1.0, seed=1) for f in range(8, 16, 2)]
    units.append(Unit(index=4, first=8, size=2, weight=0.0, seed=1))  # padding
    found = sum(job.unit_loss(model, device, plan, text, unit, words) for unit in units)
    samples = text.samples(8, 8)
    expected = model(
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        token_type_ids=samples.token_type_ids,
        labels=samples.labels,
    )
    right = (expected.logits.argmax(-1) == samples.labels).sum().item() / words
    assert found.tolist() == pytest.approx([expected.loss.item(), right], rel=1e-5)


def test_roberta_needs_two_more_positions(job, data):
    changes = {"model__model_type": "roberta", "model__pad_token_id": 1, "data": str(data / "bert")}
    changes |= {"seq_len": 48, "model__max_position_embeddings": 49}
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB, **changes))
    with pytest.raises(TrainError, match="=49 a roberta reads at most 47 tokens"):
        job.open_split(plan, "train", of_words=True)


def test_data_of_texts_is_not_for_words(job, data):
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB, data=str(data / "bert"), seq_len=48))
    with pytest.raises(TrainError, match="has a label for each word: train bert_ner on this data"):
        job.open_split(plan, "train")
