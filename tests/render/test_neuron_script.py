"""What the rendered scripts set for Neuron, by recipe and precision."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ..processes import run_process

ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_"


def exported(script: Path) -> dict[str, str]:
    """Return what the lines of a script export, in which a value has no blank or is quoted."""
    found = {}
    for line in script.read_text().splitlines():
        if line.startswith("export "):
            found |= dict(re.findall(r"(\w+)=('[^']*'|\S*)", line.partition("  #")[0]))
    return found


@pytest.fixture
def render(cli, tmp_path):
    """Render a recipe for two nodes of trn1 with these settings."""

    def render(recipe: str, *sets: str) -> Path:
        words = [word for setting in sets for word in ("--set", setting)]
        cluster = ("--cluster", "trn1", "--nodes", "2", "--time", "60")
        done = cli("render", recipe, *cluster, "--force", "-o", tmp_path / "bundle", *words)
        assert done.code == 0, done
        return tmp_path / "bundle"

    return render


@pytest.mark.parametrize(
    ("recipe", "sets", "on"),
    [
        ("bert_pretrain", (), False),
        ("bert_pretrain", ("train.optimizer_precision=fp32_state",), True),
        ("bert_pretrain", ("train.optimizer_precision=as_model",), True),
        ("bert_pretrain", ("train.optimizer_precision=as_model", "precision=mixed"), False),
        ("bert_sentiment", (), False),
        ("gpt2_zero1", ("precision=bf16",), False),
        ("llama3_clm", ("strategy.name=xla_fsdp",), False),
    ],
)
def test_rounding_is_stochastic_where_bf16_parameters_have_no_copy(render, recipe, sets, on):
    seen = exported(render(recipe, *sets) / "train.sbatch")
    assert (seen[f"{ROUNDING}EN"], seen.get(f"{ROUNDING}SEED")) == (
        ("1", "0") if on else ("0", None)
    )


@pytest.mark.parametrize("flags", ["", "-O1", "-O1 --retry_failed_compilation"])
def test_what_was_interrupted_is_compiled_again_once_asked_for(render, flags):
    bundle = render("bert_pretrain", f"neuron.cc_flags={flags}")
    for phase in ("precompile", "train"):
        words = exported(bundle / f"{phase}.sbatch")["NEURON_CC_FLAGS"].strip("'").split()
        assert words.count("--retry_failed_compilation") == 1
        assert ("-O1" in words) == ("-O1" in flags)


def test_logical_cores_are_said_to_compiler_and_runtime_alike(render, cli):
    trn2 = "instance_types={trn2.48xlarge: {lnc: 1, workers: [128], multi_node_workers: [128]}}"
    for sets, lnc in (((), "2"), ((trn2,), "1")):
        bundle = render("bert_pretrain", "instance_type=trn2.48xlarge", *sets)
        for phase in ("precompile", "train"):
            seen = exported(bundle / f"{phase}.sbatch")
            assert seen["NEURON_LOGICAL_NC_CONFIG"] == lnc
            assert f"--lnc={lnc} " in seen["NEURON_CC_FLAGS"]
    where = ("--cluster", "trn2", "--time", "60", "--set")
    for setting in ("neuron.cc_flags=--lnc 1", "env.NEURON_LOGICAL_NC_CONFIG=1"):
        done = cli("render", "bert_pretrain", *where, setting)
        assert done.code == 1 and "instance_types." in done.err, done


def test_a_precompile_waits_for_its_slowest_node(render):
    bundle = render("bert_pretrain", "slurm.srun_wait_s=7")
    assert " --wait=0 " in (bundle / "precompile.sbatch").read_text()
    assert " --wait=7 " in (bundle / "train.sbatch").read_text()


@pytest.mark.parametrize(
    "recipe", ["gpt2_zero1", "bert_pretrain", "bert_mrpc", "bert_sentiment", "bert_ner"]
)
def test_torchneuron_has_its_own_cache_and_nothing_of_xla(cli, tmp_path, recipe):
    bundle = tmp_path / "bundle"
    words = ("--cluster", "trn2", "--nodes", "2", "--time", "60", "-o", bundle)
    done = cli("render", recipe, *words)
    assert done.code == 0, done
    node = (bundle / "node.sh").read_text()
    assert 'NEFF_CACHE_DIR="$TRNSLURM_CACHE/trnslurm/$TRNSLURM_GRAPH_KEY/neff"' in node
    assert 'NEURON_RT_ROOT_COMM_ID="$MASTER_ADDR:$TRNSLURM_DEVICE_PORT"' in node
    assert "trnslurm.node.launcher --workers=64 " in node and "trnslurm.node.graphs verify" in node
    for phase in ("precompile", "train"):
        script = (bundle / f"{phase}.sbatch").read_text()
        seen = exported(bundle / f"{phase}.sbatch")
        assert seen["NEURON_LOGICAL_NC_CONFIG"] == "2" and "--lnc=2" in seen["NEURON_CC_FLAGS"]
        assert seen["FI_EFA_USE_DEVICE_RDMA"] == "1"
        for of_xla in (
            "NEURON_COMPILE_CACHE",
            "retry_failed",
            "FUSE_SOFTMAX",
            "ALLREDUCE_",
            "PJRT",
        ):
            assert of_xla not in script + node, of_xla
        assert "neuron_parallel_compile" not in script + node


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--cluster", "trn1", "--set", "device=torchneuron"),
            "trn1.32xlarge has neuron, and --set device=torchneuron requests torchneuron",
        ),
        (
            ("--cluster", "trn2", "--set", "device=neuron"),
            "neuron_sdk 2.33.0 is for device torchneuron, but gpt2_zero1 (xl) on trn2.48xlarge uses"
            " neuron: set neuron_sdk to 2.29.1 or 2.31.1, or device to torchneuron",
        ),
        (
            ("--cluster", "trn1", "--set", "neuron_sdk=2.33.0"),
            "neuron_sdk 2.33.0 is for device torchneuron, but gpt2_zero1 (xl) on trn1.32xlarge uses"
            " neuron: set neuron_sdk to 2.29.1 or 2.31.1",
        ),
        (
            ("--cluster", "trn1", "--set", "neuron_sdk=2.33.1"),
            "neuron_sdk 2.33.1 is for device torchneuron, but gpt2_zero1 (xl) on trn1.32xlarge uses"
            " neuron: set neuron_sdk to 2.29.1 or 2.31.1",
        ),
        (
            ("--cluster", "trn2", "--set", "compile_layout=per-host"),
            "TorchNeuron has one cache directory for all hosts: set compile_layout to shared",
        ),
        (
            ("--cluster", "trn2", "--set", "compile_cache=s3://bucket/graphs"),
            "TorchNeuron has one cache directory for all hosts",
        ),
        (
            ("--cluster", "trn2", "--set", "env.TORCH_NEURONX_NEFF_CACHE_DIR=/tmp/x"),
            "compile_cache",
        ),
        (
            ("--cluster", "trn2", "--set", "instance_type=trn3", "--set", "device=neuron", "--set",
             "instance_types={trn3: {device: torchneuron, accelerators: 1, workers: [1], "
             "multi_node_workers: [1], vcpus: 8, host_gib: 64, lnc: 2}}"),
            "trn3 has torchneuron, and --set device=neuron requests neuron",
        ),
    ],
)  # fmt: skip
def test_a_stack_that_the_hardware_or_the_sdk_lacks_is_refused_in_one_line(cli, words, said):
    done = cli("render", "gpt2_zero1", "--nodes", "2", "--time", "60", "--preset", "xl", *words)
    assert done.code == 1 and len(done.err.splitlines()) == 1, done
    assert said in done.err


def test_the_host_submits_graphs_ahead_where_the_runtime_can(render) -> None:
    name = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"
    for sets, value in (
        ((), "3"),
        ((f"env.{name}=0",), "0"),
        (("neuron_sdk=2.31.1",), None),
    ):
        assert exported(render("gpt2_zero1", *sets) / "train.sbatch").get(name) == value


def test_directories_of_torchneuron_go_with_their_steps(cli, tmp_path: Path) -> None:
    words = ("--cluster", "trn2", "--nodes", "2", "--preset", "xl", "--time", "60")
    assert cli("render", "gpt2_zero1", *words, "-o", tmp_path / "bundle").code == 0
    node = (tmp_path / "bundle/node.sh").read_text()
    own = node[node.index("# TorchNeuron's own files") : node.index('"$TORCH_NEURONX_DEBUG_DIR"\n')]
    ended, alive = (
        tmp_path / f"trnslurm-{os.getuid()}-{pid}-abc" for pid in (9999999, os.getpid())
    )
    (ended / "neff").mkdir(parents=True)
    alive.mkdir()
    shell = f'set -euo pipefail\n{own}"$TORCH_NEURONX_DEBUG_DIR"\necho $TRNSLURM_LOCAL'
    done = run_process(["/bin/bash", "-c", shell], env={**os.environ, "TMPDIR": str(tmp_path)})
    made = Path(done.out.strip())
    assert done.code == 0 and made.stat().st_mode & 0o777 == 0o700, done.err
    assert made.parent == tmp_path and alive.is_dir() and not ended.exists()
    assert sorted(path.name for path in made.iterdir()) == ["debug", "neff"]
