"""The strategies against one process without any: losses, gradient norms, checkpoints, memory."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trnslurm.train.data.text import open_text
from trnslurm.train.sharded.values import new_values

from . import launches
from .conftest import JOBS, tiny_plan
from .launches import Launches, Scenario
from .measures import FROZEN

pytestmark = pytest.mark.rest

JOB = JOBS / "llama3_clm"
TEXT = JOB / "text.txt"
STRATEGIES = ("fsdp", "deepspeed", "xla_fsdp")  # tensor has its own file
STEPS = 8
EVALUATED = 8

# Four units of two samples: three workers have two of padding.
SHAPE = {
    "batch__micro_batch": 2, "steps": STEPS, "train__schedule": "constant",
    "train__warmup_steps": 0, "train__eval_every": STEPS, "train__save_every": 0,
    "model__num_hidden_layers": 1,
}  # fmt: skip
# Clipping is active in every step.
SGD = SHAPE | launches.SGD | {"train__max_norm": 0.5}
ADAMW = SHAPE | {"train__lr": 5e-3}
DECAY = ADAMW | {"train__weight_decay": 0.1}
# A part of the model for each of its parameters, so that they can decay differently.
UNFLATTENED = {"xla_fsdp_settings": {"flatten_parameters": False}}
FEW = {"train__stop_at": 2}
# XLA's bf16 arithmetic on a CPU is very slow.
BF16 = SGD | FEW | {"precision": "bf16", "seq_len": 16}
# Recomputed activations change no number.
SAVED = ADAMW | {"train__save_every": 2, "train__gradient_checkpointing": True}

# What of it each strategy runs on how many workers.
PLACES = [
    ("fsdp", 2), ("fsdp", 3), ("deepspeed", 2), ("deepspeed", 3),
    ("xla_fsdp", 2),  # compiling takes longest
]  # fmt: skip


def handed_on(strategy, **stop):
    return Scenario("handed-on", of(strategy, SAVED | stop), change="frozen")


def of(strategy, changes):
    return changes | {"train__strategy": strategy}


def sgd(workers, strategy):
    return Scenario(f"sgd-{strategy}-{workers}", of(strategy, SGD))


def decay(workers, strategy):
    unflattened = UNFLATTENED if strategy == "xla_fsdp" else {}
    return Scenario(f"decay-{strategy}-{workers}", of(strategy, DECAY), strategy=unflattened)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Every training of this file, in one launch for each number of workers and kind of device."""
    made = Launches(tmp_path_factory.mktemp("trainings"), TEXT, JOB)
    made.launch(
        2,
        *(make(2, name) for make in (sgd, decay) for name in ("fsdp", "deepspeed")),
        *(Scenario(f"bf16-{name}", of(name, BF16)) for name in ("fsdp", "deepspeed")),
        Scenario("averaged", of("fsdp", SGD | FEW), change="average_left_in"),
        Scenario("handed-on", of("fsdp", ADAMW | {"train__save_every": 2} | FEW), change="frozen"),
        device="cpu",
    )
    made.launch(
        2,
        sgd(2, "xla_fsdp"),
        decay(2, "xla_fsdp"),
        Scenario("bf16-xla_fsdp", of("xla_fsdp", BF16)),
        handed_on("xla_fsdp", train__stop_at=4),
    )
    made.launch(1, handed_on("deepspeed", train__stop_at=6), device="cpu")
    made.launch(
        3,
        *(sgd(3, name) for name in ("fsdp", "deepspeed")),
        handed_on("fsdp"),
        device="cpu",
    )
    return made


@pytest.fixture(scope="module")
def single_process():
    """Train in this process, as a tutorial would: PyTorch's own, the whole batch at once."""
    done = {}

    def train(frozen=(), **changes):
        key = repr((frozen, changes))
        if key not in done:
            plan = tiny_plan("cpu", 1, 1, job=JOB, data=str(TEXT), **changes)
            done[key] = train_alone(plan, frozen)
        return done[key]

    return train


def first_values(model, plan):
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return new_values(shapes, seed=plan["seed"], std=model.config.initializer_range)


def train_alone(plan, frozen=()):
    settings, size = plan["train"], plan["batch"]["global_batch"]
    model = LlamaForCausalLM(LlamaConfig(**plan["model"], attn_implementation="eager"))
    named = dict(model.named_parameters())
    first = first_values(model, plan)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.requires_grad_(name not in frozen)
            parameter.copy_(first(name, "parameter", range(len(parameter))))
    optimizer = optimizer_of(named.values(), settings)
    open_split = {"seq_len": plan["seq_len"], "seed": plan["seed"]}
    text = open_text(TEXT, split="train", **open_split)
    result = {"loss": [], "grad_norm": []}
    for step in range(plan["steps"]):
        tokens = text.samples(step * size, size)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), settings["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
    held_out = open_text(TEXT, split="eval", **open_split).samples(0, EVALUATED)
    with torch.no_grad():
        result["eval_loss"] = model(held_out, labels=held_out).loss.item()
    return result


def optimizer_of(parameters, settings):
    groups = [
        {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": settings["weight_decay"],
        },
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if settings["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=settings["lr"])
    betas = (settings["beta1"], settings["beta2"])
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=betas, eps=settings["eps"])


def assert_frozen(trainings):
    """The parameters that are not trained are, bit for bit, as they were made."""
    [*_, (manifest, last)] = trainings.saved("handed-on")
    plan = json.loads((trainings.directory / "handed-on" / "plan.json").read_text())
    with torch.device("meta"):
        first = first_values(LlamaForCausalLM(LlamaConfig(**plan["model"])), plan)
    assert manifest.frozen == sorted(FROZEN)
    for name, found in last.items():
        assert torch.equal(found, first(name, "parameter", range(len(found)))) == (name in FROZEN)


def assert_same(outcome, alone, tolerance=1e-3):
    assert outcome.column("step") == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert outcome.column(key) == pytest.approx(alone[key], rel=tolerance)
    assert outcome.metrics[-1]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=tolerance)


@pytest.mark.parametrize(("strategy", "workers"), PLACES)
def test_with_sgd_losses_and_norms_are_those_of_a_single_process(
    trainings, single_process, strategy, workers
):
    alone = single_process(**SGD)

    # What is asked for is 1e-3, but here nothing amplifies that sums are in another order.
    assert_same(trainings.outcome(f"sgd-{strategy}-{workers}"), alone, 1e-5)
    assert min(alone["grad_norm"]) > 0.5, "clipping is not always active"


@pytest.mark.parametrize(("strategy", "workers"), [place for place in PLACES if place[1] == 2])
def test_with_adamw_and_decay_too(trainings, single_process, strategy, workers):
    assert_same(trainings.outcome(f"decay-{strategy}-{workers}"), single_process(**DECAY))


def test_the_mean_over_workers_would_be_seen(trainings):
    right = trainings.outcome("sgd-fsdp-2").column("grad_norm")[0]
    wrong = trainings.outcome("averaged").column("grad_norm")[0]

    assert abs(wrong / right - 0.5) < 1e-3


def test_each_strategy_goes_on_from_what_another_one_saved(trainings, single_process):
    outcome = trainings.outcome("handed-on")

    assert [line["attempt"] for line in outcome.metrics] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert_same(outcome, single_process(FROZEN, **ADAMW), 1e-4)
    assert_frozen(trainings)
    outputs = "".join(trainings.outputs)
    for step, was in ((2, "2 workers (cpu)"), (4, "2 workers (xla-cpu)"), (6, "1 workers (cpu)")):
        assert f"resuming from step-{step:08d}, written by {was}" in outputs
    assert "note: train.strategy was 'fsdp', is 'xla_fsdp'" in outputs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_worker_has_its_part_of_the_optimizer_state(trainings, strategy):
    parts = [result["state_bytes"] for result in trainings.results(f"decay-{strategy}-2")]

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**tiny_plan("cpu", 1, 1, job=JOB, **SHAPE)["model"]))
    # Two moments of 4 bytes of its part; what does not divide is filled up.
    whole = 8 * model.num_parameters()
    assert len(parts) == 2
    assert whole <= sum(parts) and max(parts) < 0.52 * whole


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_rounds_what_is_computed(trainings, single_process, strategy):
    rounded, alone = trainings.outcome(f"bf16-{strategy}"), single_process(**SGD, seq_len=16)

    for key in ("loss", "grad_norm"):
        assert rounded.column(key) != pytest.approx(alone[key][:2], rel=1e-6)
        assert rounded.column(key) == pytest.approx(alone[key][:2], rel=2e-2)


def test_graphs_are_compiled_in_the_first_two_steps(trainings):
    for name in ("sgd-xla_fsdp-2", "decay-xla_fsdp-2"):
        graphs = trainings.outcome(name).column("graphs")
        assert len(set(graphs[1:])) == 1, graphs
