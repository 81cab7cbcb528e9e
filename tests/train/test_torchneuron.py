"""The device torchneuron, on tests/neuron_device in the place of AWS's torch_neuronx.

The same trainings as on cpu: what differs is that tensors are on a device `neuron`, which knows no
float64, that collectives take tensors of this device only, that torch.compile is AWS's,
and that ZeRO-1 divides the optimizer's state.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trnslurm.node.preflight import checkup

from . import launches
from .conftest import JOBS, REPO, prepare_data, run_workers
from .launches import Launches, Scenario, assert_same

pytestmark = pytest.mark.rest

STAND_IN = REPO / "tests/neuron_device"
# Other kernels than cpu's may take sums in another order.
TOLERANCE = 1e-6
KEYS = ("loss", "grad_norm")
FEW = {"batch__micro_batch": 2, "steps": 4, "train__eval_every": 2, "train__save_every": 0}
GPT2 = FEW | {"model__n_layer": 1}
SAVED = GPT2 | {"steps": 6, "train__save_every": 2}
COMPILED = {"train__compile": True}
BERT = FEW | launches.SMALL | COMPILED
LLAMA = FEW | {"model__num_hidden_layers": 1, "train__strategy": "fsdp"} | COMPILED
SENTENCES = [f"{'good' if n % 2 else 'bad'} number {n} of all" for n in range(40)]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """Build the device, once for each PyTorch; return the variables for the workers."""
    if shutil.which("g++") is None:
        pytest.skip("the stand-in for Neuron's device needs g++")
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{STAND_IN}", "USE_TORCH_XLA": "0"}
    command = [sys.executable, "-c", "import torch_neuronx"]
    subprocess.run(command, env=os.environ | environ, timeout=600, check=True)
    return environ


def on_both(
    directory: Path,
    job: str,
    data: Path,
    *scenarios: Scenario,
    environ: dict[str, str],
    workers: int = 2,
) -> dict[str, Launches]:
    """Run trainings on workers of torchneuron, and of cpu, where nothing is compiled.

    Inductor, which compiles there, has other random numbers.
    """
    eager = [replace(each, changes=each.changes | {"train__compile": False}) for each in scenarios]
    made = {name: Launches(directory / name, data, JOBS / job) for name in ("cpu", "torchneuron")}
    for launches_of in made.values():
        launches_of.directory.mkdir()
    made["cpu"].launch(workers, *eager, device="cpu")
    made["torchneuron"].launch(workers, *scenarios, device="torchneuron", **environ)
    return made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((JOBS / "gpt2_zero1/text.txt").read_bytes()[:3250])
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, text, environ):
    directory = tmp_path_factory.mktemp("gpt2")
    shapes = {
        "adamw": GPT2,
        "sgd": GPT2 | launches.SGD | {"train__max_norm": 0.5},
        "mixed": GPT2 | {"precision": "mixed"},
        "bf16": GPT2 | {"precision": "bf16"},
        "as_model": GPT2 | {"precision": "bf16", "train__optimizer_precision": "as_model"},
        "compiled": GPT2 | COMPILED,
        "recomputed": GPT2 | COMPILED | {"train__gradient_checkpointing": True},
    }
    scenarios = [Scenario(name, shape) for name, shape in shapes.items()]
    scenarios += [Scenario("elastic", SAVED | {"train__stop_at": 4}), Scenario("whole", SAVED)]
    made = on_both(directory, "gpt2_zero1", text, *scenarios, environ=environ)
    made["torchneuron"].launch(3, Scenario("elastic", SAVED), device="torchneuron", **environ)
    return made


@pytest.mark.parametrize("name", ["adamw", "sgd", "compiled", "recomputed"])
def test_gpt2_with_zero1_has_the_losses_of_cpu(gpt2, name):
    found, there = (gpt2[device].outcome(name) for device in ("torchneuron", "cpu"))
    assert_same(found, there, (*KEYS, "eval_loss"), TOLERANCE)
    assert found.ledger == there.ledger
    assert len({result["parameters"] for result in found.results}) == 1


@pytest.mark.parametrize(
    ("name", "tolerance"), [("mixed", 1e-2), ("bf16", 1e-2), ("as_model", 2e-2)]
)
def test_in_bf16_they_are_alike(gpt2, name, tolerance):
    found, there = (gpt2[device].outcome(name) for device in ("torchneuron", "cpu"))
    assert_same(found, there, ("loss",), tolerance)


def test_each_worker_has_its_rows_of_the_optimizer_state(gpt2):
    whole = [result["state_bytes"] for result in gpt2["cpu"].results("adamw")]
    parts = [result["state_bytes"] for result in gpt2["torchneuron"].results("adamw")]
    assert len({*whole}) == 1 and all(0.5 <= part / whole[0] < 0.52 for part in parts)


def test_a_checkpoint_of_two_workers_is_resumed_on_three(gpt2):
    found, whole = (gpt2["torchneuron"].outcome(name) for name in ("elastic", "whole"))
    assert found.column("step") == [1, 2, 3, 4, 5, 6]
    assert_same(found, whole, KEYS, 1e-5)


def test_what_a_step_measures_is_the_devices_own(gpt2):
    last = gpt2["torchneuron"].outcome("compiled").metrics[-1]
    assert last["device_memory_mb"] > 0 and last["graphs"] >= 2 and last["late_graphs"] == 0


def test_llama_by_fsdp2_has_the_losses_of_cpu(tmp_path, text, environ):
    scenarios = [
        Scenario("adamw", LLAMA),
        Scenario("recomputed", LLAMA | {"train__gradient_checkpointing": True}),
    ]
    made = on_both(tmp_path, "llama3_clm", text, *scenarios, environ=environ)
    for name in ("adamw", "recomputed"):
        found, there = (made[device].outcome(name) for device in ("torchneuron", "cpu"))
        assert_same(found, there, (*KEYS, "eval_loss"), TOLERANCE)


def test_llama_by_tensor_parallelism_has_the_losses_of_cpu(tmp_path, text, environ):
    """Of two groups of two workers, with ZeRO-1 over the groups; resumed in one group of four."""
    shape = LLAMA | {"train__strategy": "tensor", "train__compile": False, "model__vocab_size": 260}
    saved = shape | {"steps": 6, "train__save_every": 2}
    two, four = {"workers": 2}, {"workers": 4}
    scenarios = [
        Scenario("bf16", shape | {"precision": "bf16"}, strategy=two),
        Scenario("recomputed", shape | {"train__gradient_checkpointing": True}, strategy=two),
        Scenario("elastic", saved | {"train__stop_at": 4}, strategy=two),
    ]
    made = on_both(tmp_path, "llama3_clm", text, *scenarios, environ=environ, workers=4)
    found, there = (made[device].outcome("recomputed") for device in ("torchneuron", "cpu"))
    assert_same(found, there, (*KEYS, "eval_loss"), TOLERANCE)
    found, there = (made[device].outcome("bf16") for device in ("torchneuron", "cpu"))
    assert_same(found, there, ("loss",), 1e-2)
    rest = Scenario("elastic", saved, strategy=four)
    made["torchneuron"].launch(4, rest, device="torchneuron", **environ)
    made["cpu"].launch(1, Scenario("whole", saved, strategy={"workers": 1}), device="cpu")
    found, whole = made["torchneuron"].outcome("elastic"), made["cpu"].outcome("whole")
    assert found.column("step") == [1, 2, 3, 4, 5, 6]
    assert_same(found, whole, KEYS, 1e-5)


def test_bert_has_the_losses_of_cpu(tmp_path, environ):
    from .make_shards import make_shards

    make_shards(tmp_path / "shards", [37])
    make_shards(tmp_path / "shards", [20], split="test")
    scenarios = [
        Scenario("plain", BERT),
        Scenario("zero1", BERT | {"train__zero1": True}, change="frozen"),
    ]
    made = on_both(tmp_path, "bert_pretrain", tmp_path / "shards", *scenarios, environ=environ)
    for name in ("plain", "zero1"):
        found, there = (made[device].outcome(name) for device in ("torchneuron", "cpu"))
        assert_same(found, there, (*KEYS, "mlm_loss", "eval_mlm_loss"), TOLERANCE)


@pytest.mark.parametrize("job", ["bert_mrpc", "bert_sentiment", "bert_ner"])
def test_classifiers_have_the_losses_of_cpu(tmp_path, environ, job):
    data = labelled(tmp_path, job)
    shape = BERT | {"seq_len": 32, "model__num_labels": 2}
    made = on_both(tmp_path, job, data, Scenario("adamw", shape), environ=environ)
    found, there = (made[device].outcome("adamw") for device in ("torchneuron", "cpu"))
    assert_same(found, there, (*KEYS, "eval_loss"), TOLERANCE)


def test_the_workers_of_a_checkup_measure_on_it(tmp_path, environ):
    (tmp_path / "state").mkdir()
    (tmp_path / "plan.json").write_text('{"device": "torchneuron"}')
    script = tmp_path / "checkup.py"
    script.write_text(
        "from trnslurm.devices.torchneuron import TorchNeuron\n"
        "from trnslurm.train import checkup\n"
        "TorchNeuron.checkup_mb = 1\ncheckup.main()\n"
    )
    done = run_workers(2, script, "plan.json", cwd=tmp_path, device="torchneuron", **environ)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        seen = json.loads((tmp_path / f"state/checkup-rank{rank}.json").read_text())
        assert (seen["doing"], seen["error"], seen["world"], seen["ones"]) == ("", "", 2, 2.0)
        assert seen["to_nearest"] and len(seen["took_s"]) == 3


def test_a_checkup_finds_the_graph_that_node_0_compiled(tmp_path, environ, monkeypatch, capfd):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    graph = checkup.NativeGraph(1000, str(tmp_path / "cache"))
    made = graph.compile()
    assert made["problem"] is None and len(made["files"]) == 1, capfd.readouterr()
    assert graph.find(made) == {"problem": None}
    other = checkup.NativeGraph(1000, str(tmp_path / "other"))
    again = {"problem": "it compiled 1 graphs again instead of finding them"}
    assert other.find(made) == again
    assert graph.compile()["files"] != []  # that of an earlier checkup is none
    Path(made["files"][0]["path"]).write_text("other")
    assert "different content here" in graph.find(made)["problem"]
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    assert graph.compile()["problem"] == "its run failed (exit code 1): the error is above"
    assert "No module named 'torch_neuronx'" in capfd.readouterr().out


def test_a_short_run_fills_the_cache_that_trainings_verify(tmp_path, environ):
    """Of two nodes, through the rendered scripts; the second submission finds its graphs."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{STAND_IN}:${{PYTHONPATH:-}}" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    settings = {
        "device": "torchneuron", "neuron_sdk": "2.33.0", "preflight": "false", "steps": 3,
        "python": python, "run_root": tmp_path / "runs", "compile_cache": tmp_path / "cache",
        "model.n_layer": 1, "train.compile": "true",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "trnslurm", "submit", "gpt2_zero1", "--cluster", "local"]
    command += ["--preset", "tiny", "--nodes", "2", "--workers", "1", *words]
    outputs = [
        subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(REPO), "HOME": str(tmp_path)},
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        )
        for _ in range(2)
    ]  # fmt: skip
    for done in outputs:
        assert done.returncode == 0 and "COMPLETED" in done.stdout, done
    assert ["PRECOMPILING" in done.stderr for done in outputs] == [True, False]
    (manifest,) = (tmp_path / "cache/trnslurm").glob("*/manifest.json")
    graphs = {str(file.relative_to(tmp_path / "cache")) for file in manifest.parent.rglob("*.neff")}
    nodes = json.loads(manifest.read_text())["nodes"]
    assert graphs and {file["name"] for node in nodes for file in node["files"]} == graphs


def labelled(directory: Path, job: str) -> Path:
    """Prepare some rows for a classifier."""
    file = directory / "rows"
    common = ("--holdout=0.2", "--tokenizer=train:200")
    if job == "bert_ner":
        file = file.with_suffix(".conll")
        words = [" ".join(s.split()) for s in SENTENCES]
        file.write_text(
            "\n\n".join(
                "\n".join(f"{w} {'B-PER' if w == 'good' else 'O'}" for w in s.split())
                for s in words
            )
        )
        own = ("--task=ner", "--seq-len=32", "--label=O", "--label=B-PER")
    elif job == "bert_mrpc":
        file = file.with_suffix(".csv")
        rows = [f"{s},{s if n % 4 else 'other'},{int(n % 4 > 0)}" for n, s in enumerate(SENTENCES)]
        file.write_text("\n".join(["sentence1,sentence2,label", *rows]))
        columns = ("--text-column=sentence1", "--text-column=sentence2")
        own = (*columns, "--task=mrpc", "--seq-len=32")
    else:
        file = file.with_suffix(".csv")
        rows = [f"{s},{n % 2}" for n, s in enumerate(SENTENCES)]
        file.write_text("\n".join(["text,label", *rows]))
        own = ("--seq-len=32",)
    return prepare_data(directory / "prepared", "labelled", "--text", file, *own, *common)
