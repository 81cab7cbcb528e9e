"""The BERT job: the same training on any number of workers, its graphs, what its loss is."""

import json
import math
import os
import subprocess
import sys
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
from trnslurm.train.devices.device import Timer
from trnslurm.train.devices.plain import TorchDevice

from .conftest import JOBS, REPO, tiny_plan
from .launches import Launches, Scenario
from .make_shards import make_shards
from .measures import import_job

JOB = JOBS / "bert_pretrain"
SIZES = [37, 5, 22]
STEPS = 10  # of 8 samples: into the second pass over all 64
# Four units of two samples: three workers have two of padding. Compiling takes longest, so the
# model is as small as can be. Dropout is on.
SHAPE = {
    "steps": STEPS, "train__eval_every": 5, "train__save_every": 0,
    "model__num_hidden_layers": 1, "model__hidden_size": 32, "model__intermediate_size": 64,
}  # fmt: skip
# Clipping is active in every step; and unlike Adam, SGD sees a wrong scale of the gradients.
SGD = SHAPE | {
    "train__optimizer": "sgd",
    "train__lr": 0.3,
    "train__schedule": "constant",
    "train__max_norm": 0.5,
}
FEW = {"train__stop_at": 4}
# Random numbers differ between XLA and PyTorch.
NO_DROPOUT = SHAPE | {
    "model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0,
}  # fmt: skip
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
    launches = Launches(directory, directory / "shards", JOB)
    lamb_saved = LAMB | {"train__save_every": 5}
    launches.launch(
        1,
        Scenario("sgd-1", SGD),
        Scenario("lamb-resumed", lamb_saved | {"train__stop_at": 5}),
    )
    cache = {"path": "cache", "readonly": False}
    launches.launch(2, Scenario("trial", SHAPE, phase="precompile"), cache=cache)
    launches.launch(
        2,
        Scenario("whole-xla", SHAPE),
        Scenario("resumed", SAVED | {"train__stop_at": 3}),
        Scenario("resumed", SAVED),
        Scenario("on-xla", NO_DROPOUT | FEW),
        Scenario("zero1", NO_DROPOUT | FEW | {"train__zero1": True}),
        Scenario("lamb-2", LAMB),
        Scenario("lamb-resumed", lamb_saved),
        cache=cache | {"readonly": True},
    )
    elastic = NO_DROPOUT | {"train__save_every": 3}
    launches.launch(3, Scenario("sgd-3", SGD), Scenario("elastic", elastic | {"train__stop_at": 5}))
    launches.launch(
        2,
        Scenario("elastic", elastic),
        Scenario("plain", NO_DROPOUT),
        Scenario("lamb", LAMB),
        Scenario("minutes", NO_DROPOUT | FEW | MINUTES | FASTER),
        Scenario("minimal", MINIMAL | {"train__stop_at": 3}),
        Scenario("minimal", MINIMAL),
        Scenario("learnt", LEARNT | {"data": str(prepare(directory / "prepared"))}),
        device="cpu",
        TMPDIR=str(directory / "node"),
    )
    return launches


def prepare(output):
    """Make shards of the text that comes with the other job."""
    command = [sys.executable, "-m", "trnslurm.prepare", "bert", "--output", str(output)]
    command += ["--text", str(JOBS / "gpt2_zero1" / "text.txt"), "--wrapped", "--shards", "3"]
    command += ["--tokenizer", f"train:{VOCAB_SIZE}", "--seq-len", "32", "--max-pred", "5"]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    return output


def last_checkpoint(trainings, name):
    return max((trainings.directory / name / "checkpoints").iterdir())


def assert_same(outcome, other, tolerance=1e-5):
    """As far as the first goes."""
    for key in NUMBERS:
        expected = other.column(key)[: len(outcome.metrics)]
        assert outcome.column(key) == pytest.approx(expected, rel=tolerance), key


def test_what_workers_shared_on_their_node_goes_with_them(trainings):
    assert not list((trainings.directory / "node").glob("trnslurm-shards-*"))


def test_losses_norms_and_samples_do_not_depend_on_the_worker_count(trainings):
    one, outcome = trainings.outcome("sgd-1"), trainings.outcome("sgd-3")

    assert_same(outcome, one)
    assert outcome.ledger == one.ledger
    assert [place for place, _ in outcome.ledger] == list(range(STEPS * 8))
    assert min(one.column("grad_norm")) > 0.5, "clipping is not always active"
    for key in ("eval_loss", "eval_mlm_accuracy", "perplexity"):
        evaluated = [[line[key] for line in o.metrics if key in line] for o in (one, outcome)]
        assert len(evaluated[0]) == 3
        assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)


def test_stopped_on_3_xla_workers_in_the_middle_of_a_shard_and_resumed_on_2_cpus(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("plain")

    assert outcome.column("attempt") == [1] * 5 + [2] * 5
    assert_same(outcome, whole, 1e-4)
    assert outcome.ledger == whole.ledger


def test_a_pass_has_every_sample_once(trainings):
    read = [sample for _, sample in trainings.outcome("plain").ledger]

    assert len(set(read[: sum(SIZES)])) == len(set(read)) == sum(SIZES)
    assert read[: STEPS * 8 - sum(SIZES)] != read[sum(SIZES) :]


def test_resumed_on_as_many_workers_it_is_bitwise_the_same(trainings):
    resumed, whole = trainings.outcome("resumed"), trainings.outcome("whole-xla")

    for key in NUMBERS:
        assert resumed.column(key) == whole.column(key)
    assert resumed.results[0]["parameters"] == whole.results[0]["parameters"]


@pytest.mark.parametrize("name", ["whole-xla", "resumed"])
def test_a_trial_of_three_steps_has_seen_every_graph(trainings, name):
    outcome = trainings.outcome(name)

    assert all(result["misses"] > 0 for result in trainings.results("trial"))
    assert [result["misses"] for result in outcome.results] == [0, 0]
    attempt = outcome.metrics[-1]["attempt"]
    last = [line["graphs"] for line in outcome.metrics if line["attempt"] == attempt]
    assert last[-1] == last[1], "graphs after the second step"


def test_xla_zero1_and_pytorch_agree(trainings):
    plain = trainings.outcome("plain")

    for name in ("on-xla", "zero1"):
        assert_same(trainings.outcome(name), plain, 5e-5)


@pytest.mark.parametrize("name", ["lamb-2", "lamb-resumed"])
def test_lamb_is_the_same_on_xla_on_any_number_of_workers_and_after_a_stop(trainings, name):
    expected, outcome = trainings.outcome("lamb"), trainings.outcome(name)

    for key in ("loss", "grad_norm"):
        assert outcome.column(key) == pytest.approx(expected.column(key), rel=1e-4)


def test_lamb_compiles_nothing_late(trainings):
    graphs = trainings.outcome("lamb-2").column("graphs")
    assert graphs[-1] == graphs[1]


def test_where_zero1_is_off_every_worker_has_the_whole_state(trainings):
    shapes = prove(last_checkpoint(trainings, "elastic")).shapes.values()
    # Two moments of 4 bytes for each number.
    whole = 2 * 4 * sum(math.prod(shape) for shape in shapes)
    assert [result["state_bytes"] for result in trainings.results("whole-xla")] == [whole] * 2
    assert max(result["state_bytes"] for result in trainings.results("zero1")) < 0.6 * whole


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
    said = "note: it has no optimizer state: the moments start at zero, as at step 0"
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
    device = object.__new__(TorchDevice)
    device.name, device.rank, device.world, device.local_world = "cpu", 0, 1, 1
    device.timer = Timer()
    device.torch_device = torch.device("cpu")
    device.barrier = lambda name: None
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


def test_a_checkpoint_becomes_a_folder_of_hugging_face(trainings):
    run_dir = trainings.directory / "learnt"
    (run_dir / "plan-1.json").rename(run_dir / "plan.json")
    done = subprocess.run(
        [sys.executable, str(JOB / "export.py"), "plan.json", "--json"],
        cwd=run_dir, env=os.environ | {"PYTHONPATH": str(REPO), "USE_TORCH_XLA": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    folder = json.loads(done.stdout)["directory"]
    whole = BertForPreTraining.from_pretrained(folder)
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(masked.cls.predictions.bias, whole.cls.predictions.bias)
    assert whole.cls.predictions.bias.abs().sum() > 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer("the mill").input_ids) == "[CLS] the mill [SEP]"
