"""A copy of gpt2_zero1 whose embeddings are frozen, as docs/recipes.md has it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.contract.checkpoints import checkpoints_in

from .conftest import JOB, REPO
from .launches import Launches, Scenario, assert_same

FROZEN = ("transformer.wte.weight", "transformer.wpe.weight")
STEPS = 6
# Four units of two samples: three workers have two of padding. A layer after frozen embeddings
# gets no gradient from reentrant recomputation as it is.
SHAPE = {
    "batch__micro_batch": 2, "steps": STEPS, "train__eval_every": 0, "train__save_every": 1,
    "train__keep_last": STEPS, "model__n_layer": 2,
}  # fmt: skip
SHORT = SHAPE | {"train__stop_at": 2, "seq_len": 16, "model__n_layer": 1}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Trainings on cpu and, shorter, on xla-cpu, where ZeRO-1 and tied weights are different."""
    directory = tmp_path_factory.mktemp("frozen")
    job = directory / "jobs" / JOB.name
    shutil.copytree(JOB, job)
    script, page = job / "train.py", (REPO / "docs/recipes.md").read_text()
    made = "    model = make_model(plan, settings, device)\n"
    before, after = script.read_text().split(made)
    shown = page.partition("## Frozen layers")[2].partition(made)[2].partition("\n\n")[0]
    assert shown.count("\n") == 1, "two lines"
    script.write_text(f"{before}{made}{shown}\n{after}")

    launches = Launches(directory, JOB / "text.txt", job)
    recomputed = SHAPE | {"train__gradient_checkpointing": True}
    launches.launch(
        1,
        Scenario("whole", SHAPE),
        Scenario("moved", SHAPE | {"train__stop_at": 2}),
        Scenario("recomputed", recomputed | {"train__stop_at": 2}),
        device="cpu",
    )
    launches.launch(2, Scenario("moved", SHAPE | {"train__stop_at": 4}), device="cpu")
    launches.launch(3, Scenario("moved", SHAPE), device="cpu")
    launches.launch(2, Scenario("xla", SHORT | {"train__stop_at": 1}))
    launches.launch(1, Scenario("xla", SHORT), Scenario("xla-whole", SHORT))
    return launches


@pytest.mark.parametrize(("moved", "whole"), [("moved", "whole"), ("xla", "xla-whole")])
def test_they_stay_bit_for_bit_and_the_rest_is_trained_as_without_a_stop(trainings, moved, whole):
    [(_, first), *_, (manifest, last)] = trainings.saved(moved)
    [*_, (_, other)] = trainings.saved(whole)

    assert sorted(manifest.frozen) == sorted(FROZEN)
    for name, tensor in last.items():
        assert torch.equal(tensor, first[name]) == (name in FROZEN), name
        assert torch.allclose(tensor, other[name], rtol=1e-3, atol=1e-5), name
    assert_same(trainings.outcome(moved), trainings.outcome(whole), rel=1e-4)


def test_they_have_no_optimizer_state(trainings):
    [checkpoint, *_] = checkpoints_in(trainings.directory / "whole" / "checkpoints")
    keys = load_file(next(checkpoint.glob("*.safetensors"))).keys()
    [*_, (_, parameters)] = trainings.saved("whole")
    values = sum(parameter.numel() for parameter in parameters.values())

    assert {key for key in keys if key.endswith(FROZEN)} == {f"parameter/{one}" for one in FROZEN}
    assert "exp_avg/transformer.h.0.attn.c_attn.weight" in keys
    frozen = (257 + 64) * 64
    [result] = trainings.results("whole")
    assert result["state_bytes"] == 2 * 4 * (values - frozen)
    said = f"  model   {values:,} parameters ({frozen:,} of them frozen), new, fp32, adamw\n"
    assert said in trainings.outputs[0]


def test_layers_after_them_are_trained_if_recomputed(trainings):
    assert_same(trainings.outcome("recomputed"), trainings.outcome("whole"))


def test_an_export_has_them(trainings, run_export, tmp_path):
    said, _ = run_export(
        trainings.job, trainings.directory / "moved", "--output", tmp_path / "out", "--json"
    )
    assert json.loads(said)["step"] == STEPS
    exported = load_file(tmp_path / "out/model.safetensors")
    [(_, first), *_] = trainings.saved("moved")
    assert all(torch.equal(exported[name], first[name]) for name in FROZEN)
