"""The batch plan: the tutorial's numbers, the refusals, and the arithmetic over all shapes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnslurm.config.catalog import catalog, find
from trnslurm.config.load import resolve
from trnslurm.config.schema import Reference
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.devices import XLA_CUDA
from trnslurm.errors import ConfigError, PlanError
from trnslurm.plan.batch import BatchPlan, estimate, even_nodes, plan_batch
from trnslurm.plan.spec import make_spec, where_set

# BERT-large pretraining as AWS's tutorial has it: 32 workers on one trn1.32xlarge.
PHASE1 = {"global_batch": 16384, "micro_batch": 16, "workers_per_node": 32}
PHASE2 = {"global_batch": 32768, "micro_batch": 2, "workers_per_node": 32}


def known_speed(*, nodes: int, samples_per_s: float) -> Reference:
    return Reference(instance_type="trn1.32xlarge", nodes=nodes, samples_per_s=samples_per_s)


def lay_out(**changes: object) -> BatchPlan:
    values = {"global_batch": 512, "micro_batch": 1, "nodes": 2, "workers_per_node": 32}
    return plan_batch(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "workers", "accumulation", "padding_units"),
    [
        (1, 32, 16, 0),
        (2, 64, 8, 0),
        (3, 96, 6, 64),
        (4, 128, 4, 0),
        (8, 256, 2, 0),
        (16, 512, 1, 0),
    ],
)
def test_gpt2_xl(nodes: int, workers: int, accumulation: int, padding_units: int) -> None:
    plan = lay_out(nodes=nodes)
    assert (plan.workers, plan.accumulation, plan.padding_units) == (
        workers, accumulation, padding_units,
    )  # fmt: skip


def test_bert_phase1_as_the_tutorial_has_it() -> None:
    one, two = lay_out(**PHASE1, nodes=1), lay_out(**PHASE1, nodes=2)
    assert one.accumulation == 32
    assert 16 * one.workers * one.accumulation == 16384
    assert two.accumulation == 16
    hours = estimate(
        one, steps=28125, known=[known_speed(nodes=1, samples_per_s=2877)], price_per_hour=21.50
    )
    assert hours is not None
    assert hours.hours == pytest.approx(44.49, abs=0.01)  # "about 45 hours"
    assert hours.cost == pytest.approx(hours.hours * 21.50)


def test_bert_phase2_as_the_tutorial_has_it() -> None:
    plan = lay_out(**PHASE2, nodes=1)
    assert plan.accumulation == 512
    assert 2 * plan.workers * plan.accumulation == 32768


def test_three_nodes_keep_the_batch() -> None:
    """Integer division would train with 10 x 96 x 16 = 15360 samples per step."""
    plan = lay_out(**PHASE1, nodes=3)
    assert plan.global_batch == 16384
    assert (plan.accumulation, plan.padding_units) == (11, 32)
    assert plan.padding == pytest.approx(32 / 1056)
    assert even_nodes(plan) == [2, 4]


def test_batch_grows_with_the_workers_when_asked_to() -> None:
    for nodes, expected in ((1, 32), (2, 64), (3, 96)):
        plan = lay_out(mode="per_worker", per_worker=1, global_batch=None, nodes=nodes)
        assert plan.global_batch == expected
        assert plan.padding_units == 0


def test_refusal_names_the_nearest_choices() -> None:
    with pytest.raises(PlanError) as refusal:
        lay_out(global_batch=96, micro_batch=2, nodes=2)
    text = str(refusal.value)
    assert "48 micro-batches per step, fewer than 2 x 32 workers" in text
    for choice in ("1 node", "micro-batch 1", "global batch 128", "--allow-idle"):
        assert choice in text
    # Each choice that it names works.
    assert lay_out(global_batch=96, micro_batch=2, nodes=1).units == 48
    assert lay_out(global_batch=96, micro_batch=1, nodes=2).units == 96
    assert lay_out(global_batch=128, micro_batch=2, nodes=2).padding_units == 0
    assert lay_out(global_batch=96, micro_batch=2, nodes=2, allow_idle=True).padding_units == 16


def test_uneven_micro_batch_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="micro-batch 16 or 32, or global batch 500 or 525"):
        lay_out(global_batch=512, micro_batch=25)


def test_padding_is_refused_where_it_is_not_wanted() -> None:
    with pytest.raises(
        PlanError, match=r"64 of each step's 576 .*refuse.*: none with 2 or 4 nodes"
    ):
        lay_out(nodes=3, padding="refuse")
    assert lay_out(nodes=2, padding="refuse") == lay_out(nodes=2)
    with pytest.raises(PlanError, match="every node count has padding"):
        lay_out(global_batch=65, nodes=1, padding="refuse")


@pytest.mark.parametrize(
    "change",
    [{"nodes": 0}, {"micro_batch": 0}, {"global_batch": 0}, {"global_batch": None},
     {"mode": "per_worker", "per_worker": None}],
)  # fmt: skip
def test_impossible_numbers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        lay_out(**change)


@settings(deadline=None)
@given(
    units=st.integers(1, 5000),
    micro_batch=st.integers(1, 64),
    nodes=st.integers(1, 64),
    workers_per_node=st.sampled_from([1, 2, 8, 32, 64]),
)
def test_every_sample_once_and_every_worker_alike(
    units: int, micro_batch: int, nodes: int, workers_per_node: int
) -> None:
    plan = lay_out(
        global_batch=units * micro_batch, micro_batch=micro_batch, nodes=nodes,
        workers_per_node=workers_per_node, allow_idle=True,
    )  # fmt: skip
    slots = plan.accumulation * plan.workers
    assert plan.units * plan.micro_batch == plan.global_batch
    assert slots - plan.padding_units == plan.units
    assert 0 <= plan.padding_units < plan.workers
    for count in even_nodes(plan):
        even = lay_out(
            global_batch=plan.global_batch, micro_batch=micro_batch, nodes=count,
            workers_per_node=workers_per_node,
        )  # fmt: skip
        assert even.padding_units == 0


def test_estimates_between_and_beyond_what_is_known() -> None:
    known = [known_speed(nodes=4, samples_per_s=45), known_speed(nodes=1, samples_per_s=14)]

    def speed(nodes: int) -> float:
        found = estimate(lay_out(nodes=nodes), steps=100, known=known, price_per_hour=None)
        assert found is not None and found.cost is None
        return found.samples_per_s

    assert speed(1) == 14
    assert 14 < speed(2) < 28
    assert speed(4) == 45
    assert speed(8) == 90
    assert estimate(lay_out(), steps=100, known=[], price_per_hour=1.0) is None


@pytest.mark.parametrize(("preset", "hours"), [("phase1", 44.5), ("phase2", 28.7)])
def test_berts_hours_on_one_node(preset: str, hours: float) -> None:
    """The tutorial, whose optimizer is in bf16 too, speaks of about 45 hours for phase 1."""
    as_measured = ["train.optimizer_precision=as_model"]
    spec = spec_of("bert_pretrain", preset, *as_measured)
    assert spec.estimate is not None and round(spec.estimate.hours, 1) == hours


@pytest.mark.parametrize("recipe", ["gpt2_zero1", "llama3_clm"])
@pytest.mark.parametrize("cluster", ["p4d", "p4de", "p5", "p5en", "trn1", "trn2"])
def test_every_profile_that_we_ship_knows_hours(recipe: str, cluster: str) -> None:
    """So that its first command needs no --time."""
    preset = {"gpt2_zero1": "xl", "llama3_clm": "trn1" if cluster == "trn1" else "fsdp"}[recipe]
    spec = spec_of(recipe, preset, cluster=cluster, nodes=2)
    measured = {("gpt2_zero1", "trn1"), ("llama3_clm", "p4de"), ("llama3_clm", "p5")}
    if (recipe, cluster) == ("llama3_clm", "trn1"):
        assert spec.estimate is None  # nothing is published for its strategy
        return
    assert spec.estimate is not None
    assert spec.estimate.guess is ((recipe, cluster) not in measured)
    assert spec.estimate.basis.startswith("a guess: 50% ") is spec.estimate.guess


def test_a_guess_takes_half_of_the_share_of_the_peak() -> None:
    known, guess = (
        spec_of("gpt2_zero1", "xl", cluster=c, nodes=4).estimate for c in ("trn1", "p5")
    )
    assert guess.samples_per_s / known.samples_per_s == pytest.approx(0.5 * 7912 / 3040)


PROFILES = sorted(
    file.stem for file in (packaged_root() / "cluster-config").glob("*.yaml")
    if file.stem != "local"
)  # fmt: skip
ELSEWHERE = re.compile(r"fewer than \d+ x \d+ workers|choose another cluster, preset or device")


@pytest.mark.parametrize("profile", PROFILES)
def test_no_recipe_that_comes_with_us_needs_a_time_limit(profile: str) -> None:
    """On no profile that comes with us: it has hours or a limit, or fits other devices."""
    workspace = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
    fit = []
    for recipe in (packaged_root() / "jobs").glob("*/recipe.yaml"):
        name = recipe.parent.name
        try:
            spec = make_spec(resolve(workspace, name, cluster=profile), 2)
        except (ConfigError, PlanError) as error:
            assert ELSEWHERE.search(str(error)), error
        else:
            assert spec.time_min["train"] > 0
            fit.append(name)
    assert "gpt2_zero1" in fit and len(fit) > 3


def spec_of(recipe: str, preset: str, *settings: str, cluster: str = "trn1", nodes: int = 1):
    workspace = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
    config = resolve(workspace, recipe, cluster=cluster, preset=preset, settings=[*settings])
    return make_spec(config, nodes, need_time=False)


@pytest.mark.parametrize(
    ("preset", "settings", "said"),
    [
        ("phase1", (), " (published for train.optimizer_precision=as_model)"),
        (
            "phase1", ("train.optimizer_precision=fp32_state",),
            " (published for train.optimizer_precision=as_model)",
        ),
        ("phase2", (), " (published for train.optimizer_precision=as_model)"),
        (
            "phase1", ("train.optimizer=lamb",),
            " (published for train.optimizer=adamw, "
            "train.optimizer_precision=as_model)",
        ),
        ("phase1", ("seq_len=256",), " with seq_len set"),
        ("phase1_lamb", (), ""),
        ("phase2_lamb", (), ""),
    ],
)  # fmt: skip
def test_a_published_speed_is_not_that_of_another_optimizer(
    preset: str, settings: tuple[str, ...], said: str
) -> None:
    spec = spec_of("bert_pretrain", preset, *settings)
    assert spec.estimate is None
    assert where_set(spec.config, spec.instance) == said


@pytest.mark.parametrize("preset", ["fsdp", "deepspeed", "xla_fsdp"])
def test_what_the_tutorial_measured_is_known_with_its_own_settings(tmp_path, preset: str) -> None:
    """Flash attention, the strategy's file as the tutorial has it, and values that repeat ours."""
    content = {
        "fsdp": '{"activation_checkpointing": false}',
        "deepspeed": '{"train_batch_size": 8, "optimizer": {"type": "AdamW"}, '
        '"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
        "xla_fsdp": '{"xla": true, "xla_fsdp_settings": {"flatten_parameters": true}}',
    }[preset]
    (tmp_path / "file.json").write_text(content)
    choice = ["device=xla-cuda"] if preset == "xla_fsdp" else []
    plain = spec_of("llama3_clm", preset, *choice, cluster="p4de")
    choice += ["train.attention=flash_attention_2", "seq_len=4096", "precision=bf16"]
    choice += [f"strategy.{preset}_file={tmp_path / 'file.json'}"]
    chosen = spec_of("llama3_clm", preset, *choice, cluster="p4de")
    assert chosen.estimate is not None and chosen.estimate == plain.estimate
    choice += [f"strategy.{preset}.fsdp_transformer_layer_cls_to_wrap=[Other]"]
    other = spec_of("llama3_clm", preset, *choice, cluster="p4de")
    assert other.estimate is None
    assert where_set(other.config, other.instance).endswith("_cls_to_wrap set")
    eager = spec_of("llama3_clm", preset, *choice[:1], "train.attention=eager", cluster="p4de")
    assert eager.estimate is None


def test_hours_follow_epochs_where_the_batch_grows_with_the_workers() -> None:
    """Two epochs are half as many steps, and half as long, on twice the nodes; no more cost."""
    one, two = (spec_of("llama3_clm", "fsdp", cluster="p4de", nodes=n) for n in (1, 2))
    assert (one.steps, two.steps) == (7141, 3571)
    assert one.estimate is not None and two.estimate is not None
    assert two.estimate.hours == pytest.approx(one.estimate.hours / 2, rel=1e-3)
    assert two.estimate.cost == pytest.approx(one.estimate.cost, rel=1e-3)
    # As train/loop/schedule.py counts.
    assert spec_of("bert_mrpc", "mrpc", nodes=2).steps == -(-5 * 3668 // 512)


@pytest.mark.parametrize(
    ("preset", "settings", "nodes"),
    [
        ("fsdp", ("workers_per_node=4",), 1),
        ("fsdp", (), 4),
        ("xla_fsdp", ("device=xla-cuda",), 1),
        ("xla_fsdp", ("device=xla-cuda", "batch.per_worker=1", "batch.micro_batch=1"), 1),
        ("trn1_fsdp", (), 8),
    ],
)
def test_two_epochs_are_two_on_any_number_of_workers(preset: str, settings, nodes: int) -> None:
    cluster = "trn1" if preset == "trn1_fsdp" else "p4de"
    spec = spec_of("llama3_clm", preset, *settings, cluster=cluster, nodes=nodes)
    assert spec.epochs == 2
    assert spec.steps == -(-2 * 28562 // spec.batch.global_batch)


def test_epochs_of_unknown_data_have_no_hours() -> None:
    """The recipe's steps are a bound that no data reaches."""
    config = spec_of("llama3_clm", "fsdp", "data.path=mine", cluster="p4de").config
    with pytest.raises(PlanError, match=r"train.epochs ends llama3_clm .*: pass --time"):
        make_spec(config, 1)
    for known in ("data.samples=16", "steps=4"):
        spec = spec_of("llama3_clm", "fsdp", "data.path=mine", known, cluster="p4de")
        assert spec.steps == 4 and spec.estimate is not None


@pytest.mark.parametrize(
    ("recipe", "preset", "settings", "epochs"),
    [
        ("gpt2_zero1", "tutorial", (), 29),  # as the tutorial prints
        ("gpt2_zero1", "tutorial", ("batch.mode=per_worker", "batch.per_worker=2"), 57),
        ("gpt2_zero1", "tutorial", ("data.path=mine",), None),
        ("bert_mrpc", "mrpc", (), 5),
        ("bert_mrpc", "own", (), 5),
        ("bert_mrpc", "mrpc", ("steps=10",), 1),
        ("bert_sentiment", "tweets", (), 6),
        ("bert_pretrain", "phase1", (), None),
    ],
)
def test_the_number_of_epochs(recipe: str, preset: str, settings, epochs: int | None) -> None:
    assert spec_of(recipe, preset, *settings).epochs == epochs


def test_a_profile_can_say_that_its_gpus_have_torch_xla() -> None:
    """Then the hours are those that were measured with it, with each batch of the tutorial."""
    for batch, speed in ((1, 6.4), (2, 7.3), (3, 7.9)):
        sets = (f"batch.per_worker={batch}", f"batch.micro_batch={batch}")
        spec = spec_of("llama3_clm", "xla_fsdp", "device=xla-cuda", *sets, cluster="p4de")
        assert (spec.device, spec.estimate.samples_per_s) == (XLA_CUDA, speed)
    assert spec_of("llama3_clm", "fsdp", "device=cpu", cluster="p4de").estimate is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["seq_len=2048"], " with seq_len set"),
        (["model.n_layer=2", "precision=fp32"], " with model.n_layer, precision set"),
        (["device=cpu"], " with device set"),
        (["device=neuron", "train.lr=1.0", "steps=10", "batch.global_batch=1024"], ""),
        (
            ["seq_len=2048",
             "reference=[{instance_type: trn1.32xlarge, nodes: 1, samples_per_s: 7}]"],
            "",
        ),
    ],
)  # fmt: skip
def test_a_known_speed_is_not_that_of_another_model(settings: list[str], said: str) -> None:
    workspace = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
    config = resolve(workspace, "gpt2_zero1", cluster="trn1", preset="xl", settings=settings)
    spec = make_spec(config, 1, need_time=False)
    assert (spec.estimate is None) == bool(said)
    assert where_set(config, spec.instance) == said
    if said:
        with pytest.raises(
            PlanError, match=f"trn1.32xlarge{said} is unknown, so its time limit cannot be"
        ):
            make_spec(config, 1)


def test_padding_costs_time() -> None:
    known = [known_speed(nodes=1, samples_per_s=32)]
    padded = estimate(lay_out(nodes=3), steps=10, known=known, price_per_hour=None)
    assert padded is not None
    assert padded.samples_per_s == pytest.approx(96 * (1 - 64 / 576))


def test_instance_types_can_be_overridden_and_added() -> None:
    types = catalog(
        {
            "trn1.32xlarge": {"price_per_hour": 10},
            "box": {"device": "cuda", "accelerators": 2, "workers": [2, 1],
                    "multi_node_workers": [2], "vcpus": 16, "host_gib": 64},
        }
    )  # fmt: skip
    assert find(types, "trn1.32xlarge").price_per_hour == 10
    assert find(types, "trn1.32xlarge").efa == 8
    assert find(types, "box").workers == (1, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prize_per_hour": 1}, 'unknown key prize_per_hour (did you mean "price_per_hour"?)'),
        ({"efa": "eight"}, "efa must be a whole number, found 'eight'"),
        ({"efa": True}, "efa must be a whole number, found True"),
        ({"workers": [0]}, "positive whole numbers"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"vcpus": -1}, "vcpus is -1; it must not be negative"),
        (7, "must be a mapping"),
    ],
)
def test_bad_overrides_say_where(values: object, words: str) -> None:
    with pytest.raises(ConfigError, match=r"instance_types\.trn1\.32xlarge") as refusal:
        catalog({"trn1.32xlarge": values})
    assert words in str(refusal.value)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 600), st.integers(1, 20))
def test_nearest_choices(size: int, micro_batch: int, workers: int) -> None:
    """Found by their square root, they are those that looking at every number finds."""
    shape = {"global_batch": size, "micro_batch": micro_batch, "workers_per_node": workers}
    divisors = [m for m in range(1, size + 1) if size % m == 0]
    if size % micro_batch:
        near = [m for m in divisors if m < micro_batch][-1:]
        near += [m for m in divisors if m > micro_batch][:1]
        with pytest.raises(PlanError, match=f"micro-batch {' or '.join(map(str, near))},"):
            lay_out(nodes=1, **shape)
    elif size // micro_batch < workers:
        smaller = [m for m in divisors if m < micro_batch and size // m >= workers][-1:]
        words = "".join(f"micro-batch {m}, " for m in smaller)
        with pytest.raises(PlanError, match=f"nearest: {words}global batch"):
            lay_out(nodes=1, **shape)
    else:
        units = size // micro_batch
        even = [n for n in range(1, units + 1) if units % (n * workers) == 0 and n > 1][:1]
        assert even_nodes(lay_out(nodes=1, **shape)) == even


@pytest.mark.parametrize(
    ("size", "micro_batch", "words"),
    [
        (2**40, 2**40, "nearest: micro-batch 17179869184, global batch 70368744177664, or"),
        (2**40, 3, "nearest: micro-batch 2 or 4, or"),
        (2**63 - 1, 1, "global batch 9223372036854775807 is more than 1099511627776"),
    ],
)
def test_large_batches_are_refused_at_once(size: int, micro_batch: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        lay_out(global_batch=size, micro_batch=micro_batch)


def test_large_batches_are_laid_out_at_once() -> None:
    plan = lay_out(global_batch=2**40, nodes=3)
    assert plan.accumulation * plan.workers - plan.padding_units == 2**40
    assert even_nodes(plan) == [2, 4]
