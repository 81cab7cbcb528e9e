"""Tensor parallelism with ZeRO-1 against one process: losses, norms, checkpoints, export."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trnslurm.train.data.text import open_text
from trnslurm.train.devices.groups import _buckets

from . import launches
from .conftest import JOBS, tiny_plan
from .launches import Launches, Scenario
from .measures import FROZEN
from .test_strategies import EVALUATED, assert_frozen, assert_same, train_alone

pytestmark = pytest.mark.rest

JOB = JOBS / "llama3_clm"
TEXT = JOB / "text.txt"
STEPS = 8

# Four units of two samples; three workers have two of padding. Of the four heads two share one of
# keys and values, of which a group of four workers has copies. 257 does not divide.
SHAPE = {
    "train__strategy": "tensor", "model__vocab_size": 260, "batch__micro_batch": 2, "steps": STEPS,
    "train__schedule": "constant", "train__warmup_steps": 0, "train__eval_every": STEPS,
    "train__save_every": 0,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.5}
ADAMW = SHAPE | {"train__lr": 5e-3, "train__weight_decay": 0.1}
BF16 = SGD | {"precision": "bf16"}
# XLA compiles for long, and writes a checkpoint of each of two layers as of one.
SMALL = {"model__num_hidden_layers": 1}
SAVED = ADAMW | SMALL | {"train__save_every": 2, "train__gradient_checkpointing": True}
FSDP = SAVED | {"train__strategy": "fsdp"}


def in_groups(size, name, changes, **stop):
    # What is handed on has parameters that are not trained, too.
    change = "frozen" if name == "handed-on" else "nothing"
    return Scenario(name, changes | stop, change=change, strategy={"workers": size})


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in one launch for each number of workers and kind of device."""
    made = Launches(tmp_path_factory.mktemp("trainings"), TEXT, JOB)
    made.launch(
        3,
        in_groups(1, "sgd-1x3", SGD),
        Scenario("handed-on", FSDP | {"train__stop_at": 2}, change="frozen"),
        device="cpu",
    )
    made.launch(
        4,
        in_groups(4, "sgd-4", SGD),
        in_groups(2, "sgd-2x2", SGD),
        in_groups(2, "adamw-2x2", ADAMW),
        in_groups(4, "adamw-4", ADAMW),
        in_groups(2, "bf16-2x2", BF16),
        in_groups(4, "handed-on", SAVED, train__stop_at=4),
        device="cpu",
    )
    made.launch(
        4,
        in_groups(2, "xla-sgd-2x2", SGD | SMALL),
        in_groups(4, "xla-adamw-4", ADAMW | SMALL),
        in_groups(2, "handed-on", SAVED, train__stop_at=6),
    )
    made.launch(2, in_groups(2, "handed-on", SAVED), in_groups(2, "sgd-2", SGD), device="cpu")
    return made


@pytest.fixture(scope="module")
def single_process():
    """Train in this process, with transformers' model and PyTorch's optimizer."""
    done = {}

    def train(changes, frozen=()):
        key = repr((changes, frozen))
        if key not in done:
            plan = tiny_plan("cpu", 1, 1, job=JOB, data=str(TEXT), **changes)
            done[key] = train_alone(plan, frozen)
        return done[key]

    return train


@pytest.mark.parametrize("name", ["sgd-2", "sgd-4", "sgd-2x2", "sgd-1x3", "xla-sgd-2x2"])
def test_with_sgd_losses_and_norms_are_those_of_a_single_process(trainings, single_process, name):
    alone = single_process(SGD | SMALL if name.startswith("xla") else SGD)

    assert_same(trainings.outcome(name), alone, 1e-6)
    assert min(alone["grad_norm"]) > 0.5, "clipping is not always active"


@pytest.mark.parametrize("name", ["adamw-4", "adamw-2x2", "xla-adamw-4"])
def test_with_adamw_and_decay_too(trainings, single_process, name):
    on_xla = name.startswith("xla")
    alone = single_process(ADAMW | SMALL if on_xla else ADAMW)

    # AdamW amplifies that XLA rounds otherwise than PyTorch.
    assert_same(trainings.outcome(name), alone, 1e-5 if on_xla else 1e-6)


def test_resumed_with_groups_of_another_size_it_is_the_same_training(trainings, single_process):
    outcome = trainings.outcome("handed-on")

    assert [line["attempt"] for line in outcome.metrics] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert_same(outcome, single_process(ADAMW | SMALL, FROZEN), 1e-5)
    assert_frozen(trainings)
    for step, was in ((2, "3 workers (cpu)"), (4, "4 workers (cpu)"), (6, "4 workers (xla-cpu)")):
        said = f"resuming from step-{step:08d}, written by {was}"
        assert said in "".join(trainings.outputs)


def test_its_checkpoint_is_exported_for_transformers(trainings, run_export, tmp_path):
    run_dir = trainings.directory / "handed-on"
    out, _ = run_export(JOB, run_dir, "--output", tmp_path / "llama", "--json")
    assert json.loads(out)["step"] == STEPS
    model = LlamaForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="eager")

    plan = json.loads((run_dir / "plan.json").read_text())
    split = {"seq_len": plan["seq_len"], "seed": plan["seed"]}
    held_out = open_text(TEXT, split="eval", **split).samples(0, EVALUATED)
    with torch.no_grad():
        loss = model(held_out, labels=held_out).loss.item()
    ended = trainings.outcome("handed-on").metrics[-1]
    assert loss == pytest.approx(ended["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["adamw-4", "adamw-2x2"])
def test_all_workers_together_have_the_optimizer_state_once(trainings, name):
    parts = [result["state_bytes"] for result in trainings.results(name)]

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**tiny_plan("cpu", 1, 1, job=JOB, **SHAPE)["model"]))
    # Two moments of 4 bytes; copies of keys, values and norms have no copies of these.
    assert parts == [8 * model.num_parameters() / 4] * 4


def test_bf16_rounds_what_is_computed(trainings, single_process):
    rounded, exact = trainings.outcome("bf16-2x2"), single_process(SGD)

    for key in ("loss", "grad_norm"):
        assert rounded.column(key) != pytest.approx(exact[key], rel=1e-6)
        assert rounded.column(key) == pytest.approx(exact[key], rel=2e-2)


def test_torch_xla_gets_buckets_of_tensors_in_order():
    tensors = [torch.zeros(length, dtype=torch.uint8) for length in (4, 3, 3, 9, 1, 1)]
    found = [[len(tensor) for tensor in some] for some in _buckets(tensors, 7)]

    assert found == [[4, 3], [3], [9], [1, 1]]


def test_graphs_are_compiled_in_the_first_two_steps(trainings):
    for name in ("xla-sgd-2x2", "xla-adamw-4"):
        graphs = trainings.outcome(name).column("graphs")
        assert graphs[0] and len(set(graphs[1:])) == 1, graphs
