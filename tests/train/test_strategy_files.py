"""What is refused before a sharded model is made, and what it begins with; no other worker."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trnslurm.declared import find_problem
from trnslurm.devices import DEVICES
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import declaration_of, load_plan, read_settings
from trnslurm.train.sharded import llama, tensor
from trnslurm.train.sharded.settings import ShardedSettings, read_strategy
from trnslurm.train.sharded.strategy import ShardingRequest, layers_to_wrap
from trnslurm.train.sharded.values import new_values, saved_values
from trnslurm.train.sharded.zero3 import _open_deepspeed

from .conftest import JOBS, strategy_of, tiny_plan
from .measures import import_job
from .test_pretrained import save_checkpoint

JOB = JOBS / "llama3_clm"
ABLE = {
    strategy: [name for name, device in DEVICES.items() if strategy in device.strategies]
    for strategy in ("fsdp", "deepspeed", "xla_fsdp", "tensor")
}
SMALL = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def planned(tmp_path):
    """Make a plan of a strategy and its settings, for two workers."""
    job = import_job(JOB / "train.py")

    def plan_it(strategy, *, workers=2, **changes):
        values = tiny_plan(
            ABLE[strategy][-1], 1, workers, job=JOB, train__strategy=strategy, **changes
        )
        (tmp_path / "plan.json").write_text(json.dumps(values))
        plan = load_plan(tmp_path / "plan.json")
        return plan, read_settings(job.Settings, plan)

    return plan_it


@pytest.fixture
def made(planned, tmp_path):
    """Make the same with strategy.json, of which `file` changes keys."""

    def make(strategy, *, file=None, **changes):
        plan, settings = planned(strategy, **changes)
        values = json.loads((tmp_path / "plan.json").read_text())
        path = tmp_path / "strategy.json"
        path.write_text(json.dumps(strategy_of(values, JOB, {}) | (file or {})))
        return plan, settings, path

    return make


def refusal_of_file(made, *args, **options):
    plan, settings, path = made(*args, **options)
    with pytest.raises(TrainError) as error:
        read_strategy(path, plan, settings)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value).removeprefix(f"{path}: ")


def test_launcher_and_jobs_know_the_same_strategies():
    declared = declaration_of(ShardedSettings)
    assert declared is not None
    assert {*declared.fields["strategy"].choices} == {*ABLE}
    for name, devices in ABLE.items():
        able = [
            device
            for device in DEVICES
            if not find_problem(declared, "train", {"strategy": name}, {"device": device})
        ]
        assert able == devices


@pytest.mark.parametrize("strategy", [*ABLE])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_the_launcher_renders_agrees_with_the_plan(made, strategy, workers):
    plan, settings, path = made(strategy, workers=workers, train__gradient_checkpointing=True)

    assert read_strategy(path, plan, settings) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("strategy", "file", "words"),
    [
        ("deepspeed", {"train_batch_size": 4},
         "train_batch_size is 4, but the plan says 8: render the run again instead of editing one "
         "of the two"),
        ("deepspeed", {"gradient_clipping": 2.0}, "gradient_clipping is 2.0, but the plan says 1"),
        ("deepspeed", {"bf16": {"enabled": True}}, "bf16.enabled is true, but the plan says false"),
        ("deepspeed", {"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2, but"),
        ("deepspeed", {"optimizer": {"type": "AdamW"}}, 'optimizer is {"type": "AdamW"}, but the'),
        ("deepspeed", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
         "remove zero_optimization.offload_param: checkpoints need the state on the"),
        ("fsdp", {"activation_checkpointing": True},
         "activation_checkpointing is true, but the plan says false"),
        ("fsdp", {"fsdp_offload_params": True}, "unknown key fsdp_offload_params"),
        ("tensor", {"workers": 2}, "workers is 2, but the plan says 1"),
        ("tensor", {"size": 1}, "unknown key size"),
        ("xla_fsdp", {"xla": False}, "xla is false, but the plan says true"),
        ("xla_fsdp", {"xla_fsdp_settings": {"compute_dtype": "bfloat16"}},
         'xla_fsdp_settings.compute_dtype is "bfloat16", but the plan says "float32"'),
    ],
)  # fmt: skip
def test_a_file_that_disagrees_with_the_plan_is_refused(made, strategy, file, words):
    assert words in refusal_of_file(made, strategy, file=file)


def test_a_file_that_is_none_is_refused(made):
    plan, settings, path = made("fsdp")
    for content, words in (("[]", "expected keys and values"), ("{", "not JSON")):
        path.write_text(content)
        with pytest.raises(TrainError, match=words):
            read_strategy(path, plan, settings)
    path.unlink()
    with pytest.raises(TrainError, match="cannot be read"):
        read_strategy(path, plan, settings)


def test_without_deepspeed_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    with pytest.raises(TrainError, match=r"deepspeed is missing: run pip install '\.\["):
        _open_deepspeed("cpu")


def test_a_layer_that_the_model_has_not_is_refused():
    asked = {"plan": None, "settings": None, "device": None, "make_model": None}
    blueprint = nn.Sequential(nn.Linear(2, 2))
    for names, words in ((["Lineal"], "the model has no Lineal"), ([], "must name classes")):
        file = {"fsdp_transformer_layer_cls_to_wrap": names}
        with pytest.raises(TrainError, match=words):
            layers_to_wrap(ShardingRequest(**asked, blueprint=blueprint, file=file))


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (3, {}, "workers is 3, but 8 workers run on this node: a group must be within a node"),
        (4, {}, "workers is 4, which does not divide model.num_attention_heads"),
        (2, {"vocab_size": 11}, "workers is 2, which does not divide model.vocab_size"),
        (2, {"intermediate_size": 7}, "which does not divide model.intermediate_size"),
        (2, {"seq_len": 9}, "workers is 2, which does not divide seq_len"),
        (4, {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 6}, "neither"),
        (2, {"attention_dropout": 0.1}, "the workers of a group do not share random numbers"),
        (2, {"attention_bias": True}, "does not divide model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_what_a_group_cannot_divide_is_refused(make_plan, size, changes, words):
    sizes = {"vocab_size": 12, "seq_len": 8, **changes}
    plan = replace(make_plan(units=1, workers=1), seq_len=sizes.pop("seq_len"))
    device = SimpleNamespace(world=8, local_world=8)
    settings = SimpleNamespace(optimizer="sgd")
    make = partial(make_model, **sizes)
    request = ShardingRequest(plan, settings, device, {"workers": size}, make(), make)
    with pytest.raises(TrainError, match=re.escape(words)), mock.patch.object(tensor, "open_group"):
        tensor.TensorParallel(request)


def test_copies_of_keys_are_where_aws_has_them_on_trn1():
    config = SimpleNamespace(num_key_value_heads=8)
    queries, keys, ends = (
        llama.cut_of(f"model.layers.0.self_attn.{name}.weight", config, 32)
        for name in ("q_proj", "k_proj", "o_proj")
    )
    assert [worker for worker, piece in enumerate(keys.pieces) if piece == 1] == [1, 9, 17, 25]
    assert [piece // 4 for piece in queries.pieces] == [*keys.pieces]  # four heads share one
    assert sorted(queries.pieces) == [*range(32)]
    assert (queries.pieces, queries.dim, ends.dim) == (ends.pieces, 0, 1)


def test_new_values_are_the_same_however_rows_are_divided():
    shapes = {"weight": (7, 3), "norm": (3,), "last.bias": (3,)}
    read = new_values(shapes, seed=7, std=0.02)
    parts = [read("weight", "parameter", range(*ends)) for ends in ((0, 4), (4, 7))]
    whole = read("weight", "parameter", range(7))

    assert torch.equal(torch.cat(parts), whole)
    assert 0.01 < whole.std() < 0.03
    assert read("norm", "parameter", range(2)).tolist() == [1, 1]
    assert read("last.bias", "parameter", range(1)).tolist() == [0]
    assert read("weight", "exp_avg", range(1)).tolist() == [[0, 0, 0]]
    assert not torch.equal(
        new_values(shapes, seed=8, std=0.02)("weight", "parameter", range(7)), whole
    )


def make_model(**changes):
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes))


def test_a_folder_of_several_files_a_checkpoint_and_a_runs_checkpoints(weird_path):
    saved = make_model()
    saved.save_pretrained(weird_path / "folder", max_shard_size="1KB")
    assert len([*(weird_path / "folder").glob("*.safetensors")]) > 1
    save_checkpoint(weird_path / "checkpoints", 5, saved)
    for source in ("folder", "checkpoints", "checkpoints/step-00000005"):
        read = saved_values(str(weird_path / source), make_model())
        for name, parameter in saved.named_parameters():
            rows = range(1, len(parameter))
            assert torch.equal(read(name, "parameter", rows), parameter[1:]), (source, name)
            assert not read(name, "exp_avg", rows).any()


def test_another_models_folder_is_refused_with_its_names(tmp_path):
    make_model(num_hidden_layers=1, vocab_size=12).save_pretrained(tmp_path)
    with pytest.raises(TrainError) as error:
        saved_values(str(tmp_path), make_model())
    assert "does not match the model: missing: model.layers.1." in str(error.value)
    assert "lm_head.weight has shape [12, 8] instead of [11, 8]" in str(error.value)


def test_what_is_no_model_is_refused(tmp_path):
    for source, words in (
        (tmp_path, "has no *.safetensors: convert its weights to that format"),
        (tmp_path / "nowhere", "is neither a model directory nor a model in the local"),
    ):
        with pytest.raises(TrainError) as error:
            saved_values(str(source), make_model())
        assert words in str(error.value)
    (tmp_path / "model.safetensors").write_text("no")
    with pytest.raises(TrainError, match="cannot be read"):
        saved_values(str(tmp_path), make_model())


def test_flash_attention_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    job = import_job(JOB / "train.py")
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    monkeypatch.setattr(job, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(TrainError, match="the package flash-attn"):
        job.choose_attention("flash_attention_2", device)
    monkeypatch.setattr(job, "is_flash_attn_2_available", lambda: True)
    assert job.choose_attention("flash_attention_2", device) == "flash_attention_2"
