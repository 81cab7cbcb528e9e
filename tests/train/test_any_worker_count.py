"""The same training on any number of workers: losses, gradient norms, samples, resume, state."""

import math

import pytest

from trnslurm.train.checkpoint.manifest import verify

from . import launches
from .conftest import JOB
from .launches import Launches, Scenario, assert_same, assert_samples

STEPS = 20
KEYS = ("loss", "grad_norm")

# Four units of two samples: three workers have two of padding. Dropout is on. Compiling takes
# longest, so the model has one layer.
SHAPE = {
    "batch__micro_batch": 2, "steps": STEPS, "train__eval_every": 10, "train__save_every": 0,
    "model__n_layer": 1,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.5, "train__stop_at": 10}
ADAMW = SHAPE
SAVED = ADAMW | {"train__save_every": 5}

TOLERANCE = {"sgd": 1e-5, "adamw": 1e-4}
FEW = {"train__stop_at": 4}
RECOMPUTED = SGD | FEW | {"train__gradient_checkpointing": True}
# XLA's bf16 arithmetic on a CPU is very slow.
SHORT = SHAPE | {"seq_len": 16, "train__stop_at": 3}
# Random numbers differ between XLA and PyTorch.
NO_DROPOUT = ADAMW | {f"model__{kind}_pdrop": 0.0 for kind in ("embd", "attn", "resid")}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in one launch for each number of workers and way."""
    directory = tmp_path_factory.mktemp("trainings")
    text = directory / "text.txt"
    # Little enough that the training goes into its fourth epoch.
    text.write_bytes((JOB / "text.txt").read_bytes()[:3250])
    made = Launches(directory, text)
    made.launch(
        3,
        Scenario("sgd-3", SGD),
        Scenario("elastic", SAVED | {"train__stop_at": 9}),
        Scenario("padding_counts", SGD | FEW, change="padding_counts"),
        Scenario("recomputed", RECOMPUTED),
    )
    made.launch(
        2,
        Scenario("sgd-2", SGD),
        Scenario("adamw-2", ADAMW),
        Scenario("elastic", SAVED | {"train__stop_at": 14}),
        Scenario("scale_left_in", SGD | FEW, change="scale_left_in"),
        Scenario("norm_groups_set", SGD | FEW, change="norm_groups_set"),
        Scenario("mixed-2", SHORT | {"precision": "mixed"}),
        Scenario("bf16-2", SHORT | {"precision": "bf16"}),
    )
    made.launch(
        1,
        Scenario("sgd-1", SGD),
        Scenario("adamw-1", ADAMW),
        Scenario("elastic", SAVED),
        Scenario("mixed-1", SHORT | {"precision": "mixed"}),
        Scenario("bf16-1", SHORT | {"precision": "bf16"}),
        Scenario("zero1", NO_DROPOUT | FEW),
    )
    # As GPUs do it, and not Neuron, whose way is that of all XLA tests.
    made.launch(2, Scenario("functional", SGD | FEW), XLA_DISABLE_FUNCTIONALIZATION="0")
    # The other device kinds' way, without ZeRO-1.
    plain = [
        Scenario("plain", NO_DROPOUT | FEW),
        Scenario("plain-mixed", NO_DROPOUT | FEW | {"precision": "mixed"}),
        Scenario("plain-bf16", NO_DROPOUT | FEW | {"precision": "bf16"}),
        Scenario("epochs", ADAMW | {"train__epochs": 2}),
    ]
    made.launch(2, *plain, device="cpu")
    return made


@pytest.mark.parametrize(
    ("optimizer", "workers", "steps"),
    [("sgd", 2, 10), ("adamw", 2, STEPS), ("sgd", 3, 10)],
)
def test_losses_norms_and_samples_do_not_depend_on_the_worker_count(
    trainings, optimizer, workers, steps
):
    one = trainings.outcome(f"{optimizer}-1")
    outcome = trainings.outcome(f"{optimizer}-{workers}")

    assert outcome.column("step") == list(range(1, steps + 1))
    assert_same(outcome, one, (*KEYS, "eval_loss"), TOLERANCE[optimizer])
    assert len(outcome.column("eval_loss")) == 1 + steps // 10
    assert_samples(outcome, one, steps * 8, 0.5 if optimizer == "sgd" else 0)


@pytest.mark.parametrize(
    ("change", "workers"), [("scale_left_in", 2), ("norm_groups_set", 2), ("padding_counts", 3)]
)
def test_each_of_three_mistakes_would_be_seen(trainings, change, workers):
    right = trainings.outcome(f"sgd-{workers}").column("grad_norm")[0]
    wrong = trainings.outcome(change).column("grad_norm")[0]

    assert abs(wrong / right - 1) > 0.1


def test_stopped_on_3_workers_resumed_on_2_and_on_1(trainings):
    outcome, whole = trainings.outcome("elastic"), trainings.outcome("adamw-1")

    assert {line["attempt"] for line in outcome.metrics} == {1, 2, 3}
    assert outcome.column("step") == list(range(1, STEPS + 1))
    assert_same(outcome, whole, KEYS, TOLERANCE["adamw"])
    assert outcome.ledger == whole.ledger


@pytest.mark.parametrize(("attempt", "workers"), [(0, 3), (1, 2), (2, 1)])
def test_each_worker_has_its_part_of_the_optimizer_state(trainings, attempt, workers):
    parts = [result["state_bytes"] for result in trainings.attempts("elastic")[attempt]]
    [*_, checkpoint] = sorted((trainings.directory / "elastic" / "checkpoints").iterdir())
    shapes = verify(checkpoint).shapes.values()

    # Two moments of 4 bytes for each of its rows; where rows do not divide, padding makes them.
    rows = [-(-shape[0] // workers) * math.prod(shape[1:]) for shape in shapes]
    assert parts == [2 * 4 * sum(rows)] * workers
    [whole] = [result["state_bytes"] for result in trainings.outcome("adamw-1").results]
    assert max(parts) < 1.03 * whole / workers


def test_recomputed_activations_change_nothing(trainings):
    assert_same(trainings.outcome("recomputed"), trainings.outcome("sgd-1"), KEYS)


def test_in_bf16_the_worker_count_changes_no_more_than_rounding(trainings):
    for precision in ("mixed", "bf16"):
        one, two = trainings.outcome(f"{precision}-1"), trainings.outcome(f"{precision}-2")
        assert_same(two, one, ["loss"], 2e-3)
        assert_same(two, one, ["grad_norm"], 2e-2)
    assert trainings.outcome("mixed-1").column("loss") != one.column("loss")


def test_with_functionalization_it_is_the_same(trainings):
    functional, usual = trainings.outcome("functional"), trainings.outcome("sgd-2")

    assert_same(functional, usual, KEYS, 1e-6)
    said = [[result["functional"] for result in outcome.results] for outcome in (functional, usual)]
    assert said == [[True, True], [False, False]]


def test_plain_data_parallel_training_is_the_same_as_zero1(trainings):
    plain = trainings.outcome("plain")

    # XLA's kernels against PyTorch's, amplified by Adam.
    assert_same(plain, trainings.outcome("zero1"), KEYS, 5e-5)
    for name in ("plain-mixed", "plain-bf16"):
        rounded = trainings.outcome(name)
        assert rounded.column("loss") != plain.column("loss")
        assert rounded.column("loss") == pytest.approx(plain.column("loss"), rel=2e-2)


def test_a_training_of_some_epochs_ends_with_them(trainings):
    outcome = trainings.outcome("epochs")
    blocks = -(-(3250 - 3250 // 20 + 1) // 64)

    last = -(-2 * blocks // 8)
    assert outcome.column("step") == list(range(1, last + 1))
    assert set(outcome.column("steps")) == {last}
