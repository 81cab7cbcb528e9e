"""Devices that a recipe can use, and strategy.json: what it says, and what it refuses to say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trnslurm.config.load import resolve
from trnslurm.config.schema import Strategy
from trnslurm.config.search import Workspace, packaged_root
from trnslurm.devices import DEVICES, DeviceType
from trnslurm.plan.batch import even_nodes
from trnslurm.plan.sharding import OFFLOADS
from trnslurm.plan.spec import JobSpec, make_spec
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import snapshot
from trnslurm.render.job import render_job
from trnslurm.submission.job import make_job
from trnslurm.submission.resize import resize
from trnslurm.train.sharded.settings import OFFLOADS as OFFLOADS_OF_JOBS

REPO = Path(__file__).parents[2]
WORKSPACE = Workspace(roots=(packaged_root(),), cluster=None, cluster_source="")
LLAMA = ("plan", "llama3_clm", "--nodes", "1")
TOY = """\
batch: {global_batch: 64}
slurm: {time_min: 60}
strategy:
  name: xla_fsdp
  xla_fsdp: {xla_fsdp_settings: {flatten_parameters: true}}
"""


def spec_of(preset: str, *settings: str, cluster: str = "p4de", nodes: int = 1) -> JobSpec:
    if (preset, cluster) == ("xla_fsdp", "p4de"):
        settings = ("device=xla-cuda", *settings)
    config = resolve(WORKSPACE, "llama3_clm", cluster=cluster, preset=preset, settings=[*settings])
    return make_spec(config, nodes, need_time=False)


def files_of(spec: JobSpec, *, code: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    entry = {"code/jobs/llama3_clm/train.py": b""} if code is None else code
    files = render_job(spec, WORKSPACE.template_dirs(), code=entry).files
    return {name: json.loads(data) for name, data in files.items() if name.endswith(".json")}


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_what_a_device_names_is_there(device: DeviceType) -> None:
    """Its other parts are found by their names, when they are needed."""
    for name in filter(None, (device.probe, device.runtime)):
        module, _, part = name.rpartition(".")
        file = REPO / f"{module.replace('.', '/')}.py"
        assert re.search(rf"^class {part}\b", file.read_text(), re.MULTILINE), name
    assert {*device.strategies} <= {field.name for field in fields(Strategy)}
    assert device.also in {"", *DEVICES}
    assert device.on_host + device.on_gpus + device.on_trainium <= 1
    with pytest.raises(AttributeError):
        device.name = "another"


def test_launcher_and_jobs_refuse_the_same_offloads() -> None:
    assert OFFLOADS == OFFLOADS_OF_JOBS


@pytest.mark.parametrize(
    ("preset", "cluster", "device"),
    [
        ("fsdp", "p4de", "cuda"),
        ("deepspeed", "p4de", "cuda"),
        ("tiny", "local", "cpu"),
        ("tiny_xla_fsdp", "local", "xla-cpu"),
        ("xla_fsdp", "trn1", "neuron"),
        ("fsdp", "trn2", "torchneuron"),
    ],
)
def test_auto_is_what_the_hardware_and_the_job_can_both_be(
    site, preset: str, cluster: str, device: str
) -> None:
    spec = spec_of(preset, "batch.per_worker=3", cluster=cluster)
    assert spec.device.name == device
    assert spec.phases == (
        ("precompile", "train") if device in ("neuron", "torchneuron", "xla-cpu") else ("train",)
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cluster", "trn1"), "runs on torchneuron, cpu, cuda, and trn1.32xlarge has neuron"),
        (
            ("--set", "device=neuron"),
            "runs on torchneuron, cpu, cuda, and --set device=neuron requests neuron",
        ),
        (
            ("--preset", "xla_fsdp", "--cluster", "trn1", "--set", "device=xla-cuda"),
            "trn1.32xlarge has neuron, and --set device=xla-cuda requests xla-cuda",
        ),
        (
            ("--preset", "xla_fsdp"),
            "and PyTorch/XLA has not supported GPUs since 2.8: choose another preset or cluster, "
            "or pass --set device=xla-cuda if the nodes' Python has TorchAcc's build of it",
        ),
        (("--set", "devices=[gpu]"), "devices[0] is 'gpu' (did you mean \"cpu\"?)"),
        (("--set", "devices=[cpu]"), "runs on cpu, and p4de.24xlarge has cuda"),
        (("--set", "precision=mixed"), "'mixed': it works only for models that are not sharded"),
        (
            ("--set", "strategy.name=zero"),
            "expected one of fsdp, deepspeed, xla_fsdp, tensor, or empty",
        ),
        (("--set", "strategy.fsdp.wrap=[]"), "; known: fsdp_transformer_layer_cls_to_wrap"),
        (
            ("--set", "strategy.fsdp.activation_checkpointing=true"),
            "is true, but the plan says false: remove it, or set train.gradient_checkpointing",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "strategy.tensor.workers=3"),
            "strategy.tensor.workers is 3, which does not divide model.num_key_value_heads (8), "
            "and is not a multiple of it: choose 1 or 2 or 4 or 8",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "strategy.tensor.workers=16"),
            "strategy.tensor.workers is 16, which does not divide the workers of a node (8): "
            "choose 1 or 2 or 4 or 8",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "model.vocab_size=128257"),
            "is 8, which does not divide model.vocab_size (128257): choose 1",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "model.num_attention_heads=4",
             "--set", "model.num_key_value_heads=4"),
            "is 8, which does not divide model.num_attention_heads (4): choose 1 or 2 or 4",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "seq_len=4100"),
            "is 8, which does not divide seq_len (4100): choose 1 or 2 or 4",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "strategy.tensor.workers=0"),
            "strategy.tensor.workers is 0, but it must be a number of at least 1",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "strategy.tensor.size=8"),
            "unknown key strategy.tensor.size",
        ),
        (
            ("--set", "strategy.name=tensor", "--set", "batch.mode=fixed",
             "--set", "batch.global_batch=1", "--set", "strategy.tensor.workers=4"),
            "is 1 micro-batch per step, fewer than 1 x 2 groups of 4 workers",
        ),
        (
            ("--preset", "deepspeed", "--set", "strategy.deepspeed.train_batch_size=9"),
            "strategy.deepspeed.train_batch_size is 9, but the plan says 8: remove it, or set "
            "batch.global_batch",
        ),
        (
            ("--preset", "deepspeed", "--set", "strategy.deepspeed.x=.inf"),
            "strategy.deepspeed.x is inf; it must be a finite number",
        ),
        (
            ("--preset", "deepspeed", "--set", "strategy.deepspeed.zero_optimization.stage=2"),
            "set strategy.deepspeed.zero_optimization.stage=3",
        ),
        (("--preset", "deepspeed", "--set", "strategy.deepspeed.zero_optimization=3"), "must be 3"),
        (
            ("--preset", "deepspeed",
             "--set", "strategy.deepspeed.zero_optimization.offload_param={device: cpu}"),
            "zero_optimization.offload_param: checkpoints need the state on the device",
        ),
        (
            ("--set", "strategy.fsdp.fsdp_transformer_layer_cls_to_wrap=Layer"),
            "is 'Layer': it must be a list of layer classes",
        ),
        (
            ("--preset", "xla_fsdp", "--set", "device=xla-cuda",
             "--set", "strategy.xla_fsdp.xla_fsdp_settings.compute_dtype=float32"),
            'is "float32", but the plan says "bfloat16": remove it, or set precision',
        ),
        (
            ("--preset", "xla_fsdp", "--set", "device=xla-cuda",
             "--set", "strategy.xla_fsdp.xla_fsdp_settings=7"),
            "strategy.xla_fsdp.xla_fsdp_settings must be a mapping",
        ),
    ],
)  # fmt: skip
def test_refused_in_one_line(site, cli, arguments: tuple[str, ...], words: str) -> None:
    done = cli(*LLAMA, *arguments)
    assert (done.code, done.out) == (1, "")
    assert words in done.error


def test_a_recipe_may_not_name_the_strategy_twice(site, cli) -> None:
    site.recipe("train: {strategy: fsdp}\nbatch: {global_batch: 32}\n")
    done = cli("render", "toy", "--cluster", "pc", "--time", "60")
    assert done.code == 1 and "from strategy.name" in done.error


def test_a_group_counts_as_one_worker_of_the_batch(site) -> None:
    fixed = ("batch.mode=fixed", "batch.global_batch=10", "batch.micro_batch=2")
    spec = spec_of("fsdp", "strategy.name=tensor", "strategy.tensor.workers=4", *fixed, nodes=2)
    files = files_of(spec)
    batch = files["plan.json"]["batch"]
    assert (spec.batch.workers, batch["groups"], batch["accumulation"]) == (16, 4, 2)
    assert batch["padding_units"] == 3
    assert files["strategy.json"] == {"workers": 4}
    assert even_nodes(spec.batch) == []
    grows = spec_of("fsdp", "strategy.name=tensor", nodes=2)
    assert (grows.batch.groups, grows.batch.global_batch) == (2, 2)


def test_deepspeeds_batch_is_the_plans(site) -> None:
    """Padding included: 16 workers compute 2 units of 2 samples each for a batch of 40."""
    fixed = ("batch.mode=fixed", "batch.global_batch=40", "batch.micro_batch=2")
    files = files_of(spec_of("deepspeed", *fixed, "train.max_norm=0.5", nodes=2))
    plan, strategy = files["plan.json"], files["strategy.json"]
    assert plan["train"]["strategy"] == "deepspeed"
    assert (plan["workers"], plan["batch"]["padding_units"]) == (16, 12)
    assert strategy == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }


SEEDS = """{
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": true},
    "bf16": {"enabled": true}, "fp16": {"enabled": "auto", "loss_scale": 0},
    "gradient_clipping": "auto", "steps_per_print": 500
}"""


def test_a_file_of_ones_own_is_merged_with_the_plan(site, tmp_path) -> None:
    """What the plan decides may stand in it, if it is the same or "auto"; --set goes over it."""
    file = tmp_path / "ds.json"
    file.write_text(SEEDS)
    named = (f"strategy.deepspeed_file={file}", "strategy.deepspeed.steps_per_print=9")
    spec = spec_of("deepspeed", *named)
    assert files_of(spec)["strategy.json"] == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "steps_per_print": 9,
    }
    assert spec.config.origins["strategy.deepspeed.bf16.enabled"].source == str(file)
    file.unlink()  # a run has its content


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        (SEEDS, ("batch.per_worker=2",), "ds.json: train_batch_size is 8, but the plan says 16: "
         "remove it, or set batch.global_batch"),
        (SEEDS, ("precision=fp32",), "ds.json: bf16.enabled is true, but the plan says false: "
         "remove it, or set precision"),
        (SEEDS, ("train.optimizer=sgd",),
         'ds.json: optimizer.type is "AdamW", but the plan says "sgd": remove it, or set '
         "train.optimizer"),
        ('{"gradient_clipping": 1.0}', (), "ds.json: gradient_clipping is 1.0, but the plan says "
         "0.0: remove it, or set train.max_norm"),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}', (),
         "ds.json: optimizer.params.lr is 0.1, but the plan says 5e-05"),
        ('{"optimizer": {"params": {"torch_adam": true}}}', (),
         "ds.json: optimizer.params.torch_adam: trnslurm does not support this: remove it"),
        ('{"scheduler": {"type": "WarmupLR"}}', (), 'scheduler.type is "WarmupLR", but the plan '
         'says "linear": remove it, or set train.schedule'),
        ('{"fp16": {"enabled": true}}', (), "ds.json: fp16.enabled is true, but the plan"),
        ('{"zero_optimization": {"stage": 2}}', (), "stage must be 3"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', (), "offload_optimi"),
        ("[1]", (), "ds.json: not valid JSON (not a JSON object)"),
        ("", (), "ds.json: not valid JSON"),
        (None, (), "ds.json: No such file or directory"),
        (SEEDS, ("strategy.name=fsdp",), "is set, but strategy.name is 'fsdp': set strategy.name"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_the_plan_is_refused(
    site, cli, tmp_path, text: str | None, settings: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    named = [w for s in (f"strategy.deepspeed_file={file}", *settings) for w in ("--set", s)]
    done = cli(*LLAMA, "--preset", "deepspeed", *named)
    assert (done.code, done.out) == (1, "")
    assert words in done.error


# The tutorial's llama3_fsdp_native.json and llama3_fsdp_acc.json.
NATIVE_FILE = {
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "activation_checkpointing": False,
}
ACC_FILE = {
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "xla": True,
    "xla_fsdp_settings": {
        "compute_dtype": "bfloat16",
        "buffer_dtype": "bfloat16",
        "opt_flatten_overlap": True,
        "pin_layout_in_collective_ops": False,
        "flatten_parameters": True,
    },
    "xla_fsdp_grad_ckpt": False,
}


@pytest.mark.parametrize(("name", "content"), [("fsdp", NATIVE_FILE), ("xla_fsdp", ACC_FILE)])
def test_the_tutorials_fsdp_files_are_taken(site, tmp_path, name: str, content: Any) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(content))
    settings = [f"strategy.{name}_file={file}", "device=xla-cuda"][: 1 + (name == "xla_fsdp")]
    spec = spec_of(name, *settings)
    assert files_of(spec)["strategy.json"] == content
    assert files_of(spec_of(name, *settings[1:]))["strategy.json"] == content


@pytest.mark.parametrize(
    ("preset", "change", "settings", "words"),
    [
        ("fsdp", {"activation_checkpointing": True}, (),
         "fsdp.json: activation_checkpointing is true, but the plan says false: remove it, or "
         "set train.gradient_checkpointing"),
        ("fsdp", {}, ("train.gradient_checkpointing=true",),
         "fsdp.json: activation_checkpointing is false, but the plan says true"),
        ("fsdp", {"xla": True}, (), "fsdp.json: xla is true, but the plan says false: remove it, "
         "or set strategy.name"),
        ("fsdp", {"forward_prefetch": True}, (), "unknown key strategy.fsdp.forward_prefetch"),
        ("fsdp", {}, ("strategy.name=deepspeed",), "strategy.fsdp_file is set, but strategy.name "
         "is 'deepspeed': set strategy.name=fsdp, or choose another preset"),
        ("xla_fsdp", {}, ("precision=fp32",), "fsdp.json: xla_fsdp_settings.compute_dtype is "
         '"bfloat16", but the plan says "float32": remove it, or set precision'),
        ("xla_fsdp", {"xla": False}, (), "fsdp.json: xla is false, but the plan says true"),
    ],
)  # fmt: skip
def test_an_fsdp_file_that_contradicts_the_plan_is_refused(
    site, cli, tmp_path, preset: str, change: Any, settings: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps((NATIVE_FILE if preset == "fsdp" else ACC_FILE) | change))
    device = ("device=xla-cuda",) if preset == "xla_fsdp" else ()
    settings = (f"strategy.{preset}_file={file}", *settings, *device)
    done = cli(*LLAMA, "--preset", preset, *[w for s in settings for w in ("--set", s)])
    assert (done.code, done.out) == (1, "")
    assert words in done.error


def test_the_other_strategies_files_are_the_trainers(site) -> None:
    checkpointing = "train.gradient_checkpointing=true"
    assert files_of(spec_of("fsdp", checkpointing))["strategy.json"] == {
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "activation_checkpointing": True,
    }
    strategy = files_of(spec_of("xla_fsdp", "precision=fp32"))["strategy.json"]
    assert (strategy["xla"], strategy["xla_fsdp_grad_ckpt"]) == (True, False)
    assert strategy["xla_fsdp_settings"] == {
        "opt_flatten_overlap": True,
        "pin_layout_in_collective_ops": False,
        "flatten_parameters": True,
        "compute_dtype": "float32",
        "buffer_dtype": "float32",
    }


def test_the_strategy_is_in_the_key_of_the_graphs(site) -> None:
    flat = "strategy.xla_fsdp.xla_fsdp_settings.flatten_parameters=false"
    specs = [spec_of("xla_fsdp"), spec_of("xla_fsdp", flat), spec_of("xla_fsdp", "train.lr=1.0")]
    # The job's own code: its Settings mark what shapes no graph.
    code = snapshot(specs[0].config)
    ingredients = [files_of(spec, code=code)["graphs.json"] for spec in specs]
    assert ingredients[0] != ingredients[1]
    assert ingredients[0] == ingredients[2]


def test_what_the_commands_say_of_a_strategy(site, cli) -> None:
    site.recipe(TOY)
    toy, flat = ("toy", "--cluster", "pc"), "strategy.xla_fsdp.xla_fsdp_settings.flatten_parameters"
    assert '==> strategy.json <==\n{\n  "xla_fsdp_settings": {' in cli("render", *toy).out
    assert cli("render", *toy, "-o", site.root / "reviewed").code == 0
    changed = (*toy, "--set", f"{flat}=false")
    diff = cli("render", *changed, "--diff", site.root / "reviewed")
    assert diff.code == 1
    assert "--- old/strategy.json\n+++ new/strategy.json\n" in diff.out
    assert '-    "flatten_parameters": true,\n+    "flatten_parameters": false,\n' in diff.out
    shown = json.loads(cli("show", *changed, "--json").out)
    assert shown["config"]["strategy"]["name"] == "xla_fsdp"
    assert shown["origins"][flat] == {"layer": "command line", "source": f"--set {flat}=false"}
    rows = cli("compile", "key", *toy, "--explain").out.splitlines()
    assert [row.split()[1] for row in rows if row.startswith(flat)] == ["True"]


def test_another_node_count_has_its_own_file(site, tmp_path) -> None:
    """DeepSpeed's numbers depend on the workers; the training that goes on does not."""
    fixed = ("batch.mode=fixed", "batch.global_batch=40", "slurm.time_min=60")
    config = resolve(WORKSPACE, "llama3_clm", cluster="p4de", preset="deepspeed", settings=fixed)
    code, dirs = {"code/jobs/llama3_clm/train.py": b""}, WORKSPACE.template_dirs()
    job = make_job(make_spec(config, 2), dirs, code=code)
    files = resize(RunDir(tmp_path), job, 1, None, dirs).bundle.files
    strategy = json.loads(files["strategy.json"])
    assert (strategy["train_batch_size"], strategy["gradient_accumulation_steps"]) == (40, 5)
    assert json.loads(files["plan.json"])["batch"]["global_batch"] == 40


def test_without_a_strategy_there_is_no_file(site) -> None:
    config = resolve(WORKSPACE, "gpt2_zero1", cluster="local", preset="tiny")
    files = render_job(make_spec(config, 1), WORKSPACE.template_dirs()).files
    assert "strategy.json" not in files
    assert "strategy" not in json.loads(files["plan.json"])["train"]
