"""The BERT job: the same training on any number of workers, its graphs, what its loss is."""

import json
import math
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForPreTraining

from trnslurm.train.checkpoint.reading import prove
from trnslurm.train.data.shards.index import ShardSplit
from trnslurm.train.data.shards.reader import IGNORED, open_shards
from trnslurm.train.data.units import Unit

from . import launches
from .conftest import JOBS, lone_device, prepare_data, tiny_plan
from .launches import Launches, Scenario, assert_bitwise, assert_same, assert_samples
from .make_shards import make_shards
from .measures import import_job

pytestmark = pytest.mark.rest

JOB = JOBS / "bert_pretrain"
SIZES = [37, 5, 22]
STEPS = 10  # of 8 samples: into the second pass over all 64
# Four units of two samples: three workers have two of padding. Dropout is on.
SHAPE = launches.SMALL | {
    "steps": STEPS, "train__eval_every": 5, "train__save_every": 0,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.5}
FEW = {"train__stop_at": 4}
NO_DROPOUT = SHAPE | launches.NO_DROPOUT
SAVED = SHAPE | {"train__save_every": 3}
MINIMAL = SAVED | {"train__save_optimizer": False}
# Over in every step; but worker 0 is asked at reports only.
MINUTES = {"train__save_minutes": 1e-9, "train__log_every": 3, "train__keep_every": 1}
# The bias corrections of these betas become exactly 1.0 within eight steps.
LAMB = NO_DROPOUT | {
    "train__optimizer": "lamb", "train__lr": 0.02, "train__beta1": 0.1, "train__beta2": 0.1,
    "train__eval_every": 0,
}  # fmt: skip
FASTER = {"train__expected_samples_per_s": 1e9}
VOCAB_SIZE = 200
LEARNT = NO_DROPOUT | {
    "steps": 200, "batch__global_batch": 64, "batch__micro_batch": 32, "train__stop_at": 0,
    "train__eval_every": 0, "train__save_every": 200, "train__log_every": 20, "train__beta2": 0.98,
    "model__initializer_range": 0.05, "model__num_hidden_layers": 2, "model__hidden_size": 64,
    "model__intermediate_size": 128, "model__vocab_size": VOCAB_SIZE,
}  # fmt: skip
NUMBERS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in as few launches as there are numbers of workers."""
    directory = tmp_path_factory.mktemp("trainings")
    make_shards(directory / "shards", SIZES)
    make_shards(directory / "shards", [20], split="test")
    (directory / "node").mkdir()
    made = Launches(directory, directory / "shards", JOB)
    lamb_saved = LAMB | {"train__save_every": 5}
    cache = {"path": "cache", "readonly": False}
    made.launch(2, Scenario("trial", SHAPE, phase="precompile"), cache=cache)
    made.launch(
        2,
        Scenario("whole-xla", SHAPE),
        Scenario("resumed", SAVED | {"train__stop_at": 3}),
        Scenario("resumed", SAVED),
        Scenario("lamb-resumed", lamb_saved | {"train__stop_at": 5}),
        cache=cache | {"readonly": True},
    )
    elastic = NO_DROPOUT | {"train__save_every": 3}
    made.launch(3, Scenario("elastic", elastic | {"train__stop_at": 5}))
    made.launch(1, Scenario("sgd-1", SGD), device="cpu")
    made.launch(3, Scenario("sgd-3", SGD), Scenario("lamb-resumed", lamb_saved), device="cpu")
    text = ("--text", JOBS / "gpt2_zero1/text.txt", "--wrapped", "--shards", 3, "--seq-len", 32)
    words = (*text, "--max-pred", 5, "--tokenizer", f"train:{VOCAB_SIZE}")
    prepared = prepare_data(directory / "prepared", "bert", *words)
    made.launch(
        2,
        Scenario("elastic", elastic),
        Scenario("plain", NO_DROPOUT),
        Scenario("lamb", LAMB),
        Scenario("minutes", NO_DROPOUT | FEW | MINUTES | FASTER),
        Scenario("minimal", MINIMAL | {"train__stop_at": 3}),
        Scenario("minimal", MINIMAL),
        Scenario("learnt", LEARNT | {"data": str(prepared)}),
        device="cpu",
        TMPDIR=str(directory / "node"),
    )
    return made


def last_checkpoint(trainings, name):
    return max((trainings.directory / name / "checkpoints").iterdir())


def test_what_workers_shared_on_their_node_goes_with_them(trainings):
    assert not list((trainings.directory / "node").glob("trnslurm-shards-*"))


def test_losses_norms_and_samples_do_not_depend_on_the_worker_count(trainings):
    one, outcome = trainings.outcome("sgd-1"), trainings.outcome("sgd-3")

    assert_same(outcome, one, (*NUMBERS, "eval_loss", "eval_mlm_accuracy", "perplexity"))
    assert len(outcome.column("perplexity")) == 3
    assert_samples(outcome, one, STEPS * 8, 0.5)


def test_stopped_on_3_xla_workers_in_the_middle_of_a_shard_and_resumed_on_2_cpus(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("plain")

    assert outcome.column("attempt") == [1] * 5 + [2] * 5
    assert_same(outcome, whole, NUMBERS, 1e-4)
    assert outcome.ledger == whole.ledger


def test_resumed_on_as_many_workers_it_is_bitwise_the_same(trainings):
    assert_bitwise(trainings.outcome("resumed"), trainings.outcome("whole-xla"), NUMBERS)


@pytest.mark.parametrize("name", ["whole-xla", "resumed"])
def test_a_trial_of_three_steps_has_seen_every_graph(trainings, name):
    trainings.assert_trial_saw_every_graph("trial", name)


def test_lamb_is_the_same_on_xla_on_any_number_of_workers_and_after_a_stop(trainings):
    outcome = trainings.outcome("lamb-resumed")

    assert outcome.column("attempt") == [1] * 5 + [2] * 5
    assert_same(outcome, trainings.outcome("lamb"), rel=1e-4)
    graphs = outcome.column("graphs")
    assert graphs[4] == graphs[1], "compiled late"


def test_where_zero1_is_off_every_worker_has_the_whole_state(trainings):
    shapes = prove(last_checkpoint(trainings, "elastic")).shapes.values()
    # Two moments of 4 bytes for each number.
    whole = 2 * 4 * sum(math.prod(shape) for shape in shapes)
    assert [result["state_bytes"] for result in trainings.results("whole-xla")] == [whole] * 2


def test_minutes_are_worker_0s_and_told_at_reports(trainings):
    checkpoints = sorted((trainings.directory / "minutes" / "checkpoints").iterdir())
    # Reports come after the first two steps, every third, and the last.
    assert [path.name for path in checkpoints] == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    plain = trainings.outcome("plain").column("loss")
    assert trainings.outcome("minutes").column("loss") == plain[:4]


def test_from_a_minimal_checkpoint_the_moments_begin_anew(trainings):
    manifest = prove(last_checkpoint(trainings, "minimal"))
    assert manifest.kinds == ["parameter"]
    full = prove(last_checkpoint(trainings, "elastic"))
    assert manifest.num_bytes < 0.4 * full.num_bytes
    said = "note: the checkpoint has no optimizer state, so the moments start at zero, as at step 0"
    assert trainings.outputs[-1].count(said) == 1
    assert trainings.outcome("minimal").column("step") == list(range(1, STEPS + 1))


def test_the_console_has_the_tutorials_unit_and_says_if_it_is_slow(trainings):
    output = trainings.outputs[-1]
    assert "  seq/s " in output
    assert output.count("on average, less than 95% of the expected 1,000,000,000.0 (train.") == 1


def test_a_text_is_learnt_beyond_how_often_its_words_come(trainings):
    """Below the unigram entropy, which is the loss of whoever knows no more than frequencies."""
    masked = []
    for path in (trainings.directory / "prepared").glob("*_training_*.hdf5"):
        with h5py.File(path) as shard:
            masked.append(shard["masked_lm_ids"][:][shard["masked_lm_positions"][:] > 0])
    counts = np.bincount(np.concatenate(masked))
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * np.log(shares)).sum()

    losses = trainings.outcome("learnt").column("mlm_loss")
    assert losses[0] > math.log(VOCAB_SIZE) - 0.5
    assert sum(losses[-20:]) / 20 < 0.95 * entropy


@pytest.fixture(scope="module")
def job():
    return import_job(JOB / "train.py")


@pytest.fixture
def run(job, tmp_path):
    """What unit_loss works with, on a CPU by itself."""
    device = lone_device()
    plan = SimpleNamespace(**tiny_plan("cpu", 1, 1, job=JOB))
    make_shards(tmp_path / "shards", [9])
    text = open_shards(
        ShardSplit(tmp_path / "shards", "train", tmp_path),
        device=device,
        seq_len=32,
        max_pred=5,
        vocab_size=512,
        seed=1,
    )
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
        job.unit_loss(
            run.model,
            run.device,
            run.plan,
            run.text,
            Unit(index=0, first=a, size=n, weight=1.0, seed=1),
            counts,
        )
        for a, n in units
    )
    assert found[0].item() == pytest.approx(expected.loss.item(), rel=1e-5)
    right = (expected.prediction_logits.argmax(-1) == labels)[labels != IGNORED]
    assert found[3].item() == pytest.approx(right.float().mean().item())


def test_the_output_layer_and_its_bias_are_tied(run):
    names = [name for name, _ in run.model.named_parameters()]
    head = run.model.cls.predictions
    assert head.decoder.bias is head.bias
    assert head.decoder.weight is run.model.bert.embeddings.word_embeddings.weight
    assert not [name for name in names if "decoder" in name]


def test_a_checkpoint_becomes_a_folder_of_hugging_face(trainings, run_export):
    out, err = run_export(JOB, trainings.directory / "learnt", "--json")
    assert err == ""
    folder = json.loads(out)["directory"]
    whole = BertForPreTraining.from_pretrained(folder)
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(masked.cls.predictions.bias, whole.cls.predictions.bias)
    assert whole.cls.predictions.bias.abs().sum() > 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer("the mill").input_ids) == "[CLS] the mill [SEP]"
