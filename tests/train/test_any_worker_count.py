"""The same training on any number of workers: losses, gradient norms, samples, resume, state."""

import math

import pytest

from trnslurm.train.checkpoint.manifest import verify

from .conftest import JOB
from .launches import Launches, Scenario

STEPS = 20

# Four units of two samples: three workers have two of padding. Dropout is on. Compiling takes
# longest, so the model has one layer.
SHAPE = {
    "batch__micro_batch": 2, "steps": STEPS, "train__eval_every": 10, "train__save_every": 0,
    "model__n_layer": 1,
}  # fmt: skip
# Clipping is active in every step; and unlike Adam, SGD sees a wrong scale of the gradients.
SGD = SHAPE | {
    "train__optimizer": "sgd",
    "train__lr": 0.3,
    "train__schedule": "constant",
    "train__max_norm": 0.5,
    "train__stop_at": 10,
}
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
    """Every training of this file, in one launch for each number of workers."""
    directory = tmp_path_factory.mktemp("trainings")
    text = directory / "text.txt"
    # Little enough that the training goes into its fourth epoch.
    text.write_bytes((JOB / "text.txt").read_bytes()[:3250])
    launches = Launches(directory, text)
    for workers in (4, 2, 3, 1):
        again = {
            4: [Scenario("elastic", SAVED | {"train__stop_at": 9})],
            2: [
                Scenario("elastic", SAVED | {"train__stop_at": 14}),
                Scenario("same-2", SAVED | {"train__stop_at": 9}),
                Scenario("same-2", SAVED),
                Scenario("scale_left_in", SGD | FEW, change="scale_left_in"),
                Scenario("norm_groups_set", SGD | FEW, change="norm_groups_set"),
                Scenario("mixed-2", SHORT | {"precision": "mixed"}),
                Scenario("bf16-2", SHORT | {"precision": "bf16"}),
            ],
            3: [
                Scenario("elastic", SAVED),
                Scenario("padding_counts", SGD | FEW, change="padding_counts"),
                Scenario("recomputed", RECOMPUTED),
            ],
            1: [
                Scenario("mixed-1", SHORT | {"precision": "mixed"}),
                Scenario("bf16-1", SHORT | {"precision": "bf16"}),
                Scenario("zero1", NO_DROPOUT | FEW),
            ],
        }
        # On 3 and 4 workers Adam trains in `elastic`.
        whole = {
            1: [Scenario("sgd-1", SGD), Scenario("adamw-1", ADAMW)],
            2: [Scenario("sgd-2", SGD), Scenario("adamw-2", ADAMW)],
            3: [Scenario("sgd-3", SGD)],
        }
        launches.launch(workers, *whole.get(workers, []), *again[workers])
    # As GPUs do it, and not Neuron, whose way is that of all XLA tests.
    launches.launch(2, Scenario("functional", SGD | FEW), XLA_DISABLE_FUNCTIONALIZATION="0")
    # The other device kinds' way, without ZeRO-1.
    plain = [
        Scenario("plain", NO_DROPOUT | FEW),
        Scenario("plain-mixed", NO_DROPOUT | FEW | {"precision": "mixed"}),
        Scenario("plain-bf16", NO_DROPOUT | FEW | {"precision": "bf16"}),
        Scenario("epochs", ADAMW | {"train__epochs": 2}),
    ]
    launches.launch(2, *plain, device="cpu")
    return launches


def assert_same(outcome, other, optimizer, steps=STEPS):
    assert outcome.column("step") == list(range(1, steps + 1))
    for key in ("loss", "grad_norm"):
        expected = other.column(key)[:steps]
        assert outcome.column(key) == pytest.approx(expected, rel=TOLERANCE[optimizer])


@pytest.mark.parametrize(
    ("optimizer", "workers", "steps"),
    [("sgd", 2, 10), ("adamw", 2, STEPS), ("sgd", 3, 10)],
)
def test_losses_norms_and_samples_do_not_depend_on_the_worker_count(
    trainings, optimizer, workers, steps
):
    one = trainings.outcome(f"{optimizer}-1")
    outcome = trainings.outcome(f"{optimizer}-{workers}")

    assert_same(outcome, one, optimizer, steps)
    assert outcome.ledger == one.ledger[: steps * 8]
    assert [place for place, _ in outcome.ledger] == list(range(steps * 8))
    evaluated = [line["eval_loss"] for line in outcome.metrics if "eval_loss" in line]
    expected = [line["eval_loss"] for line in one.metrics if "eval_loss" in line]
    assert len(evaluated) == 1 + steps // 10
    assert evaluated == pytest.approx(expected[: len(evaluated)], rel=TOLERANCE[optimizer])
    if optimizer == "sgd":
        assert min(one.column("grad_norm")) > 0.5, "clipping is not always active"


@pytest.mark.parametrize(
    ("change", "workers"), [("scale_left_in", 2), ("norm_groups_set", 2), ("padding_counts", 3)]
)
def test_each_of_three_mistakes_would_be_seen(trainings, change, workers):
    right = trainings.outcome(f"sgd-{workers}").column("grad_norm")[0]
    wrong = trainings.outcome(change).column("grad_norm")[0]

    assert abs(wrong / right - 1) > 0.1


def test_stopped_on_4_workers_resumed_on_2_and_on_3(trainings):
    outcome = trainings.outcome("elastic")

    assert {line["attempt"] for line in outcome.metrics} == {1, 2, 3}
    assert_same(outcome, trainings.outcome("adamw-1"), "adamw")
    assert outcome.ledger == trainings.outcome("adamw-1").ledger


def test_on_as_many_workers_resumed_is_bitwise_the_same(trainings):
    whole, resumed = trainings.outcome("adamw-2"), trainings.outcome("same-2")

    assert resumed.column("step") == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert resumed.column(key) == whole.column(key)
    assert resumed.results[0]["parameters"] == whole.results[0]["parameters"]


@pytest.mark.parametrize(("attempt", "workers"), [(0, 4), (1, 2), (2, 3)])
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
    recomputed, kept = trainings.outcome("recomputed"), trainings.outcome("sgd-1")

    for key in ("loss", "grad_norm"):
        assert recomputed.column(key) == pytest.approx(kept.column(key)[:4], rel=1e-5)


def test_in_bf16_the_worker_count_changes_no_more_than_rounding(trainings):
    for precision in ("mixed", "bf16"):
        one, two = trainings.outcome(f"{precision}-1"), trainings.outcome(f"{precision}-2")
        for key, tolerance in (("loss", 2e-3), ("grad_norm", 2e-2)):
            assert two.column(key) == pytest.approx(one.column(key), rel=tolerance)
    assert trainings.outcome("mixed-1").column("loss") != one.column("loss")


def test_with_functionalization_it_is_the_same(trainings):
    functional, usual = trainings.outcome("functional"), trainings.outcome("sgd-2")

    for key in ("loss", "grad_norm"):
        assert functional.column(key) == pytest.approx(usual.column(key)[:4], rel=1e-6)
    said = [[result["functional"] for result in outcome.results] for outcome in (functional, usual)]
    assert said == [[True, True], [False, False]]


def test_plain_data_parallel_training_is_the_same_as_zero1(trainings):
    plain, zero1 = trainings.outcome("plain"), trainings.outcome("zero1")

    for key in ("loss", "grad_norm"):
        # XLA's kernels against PyTorch's, amplified by Adam.
        assert plain.column(key) == pytest.approx(zero1.column(key), rel=5e-5)
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
