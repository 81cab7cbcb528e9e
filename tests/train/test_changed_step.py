"""A copy of gpt2_zero1 whose training step is changed as docs/recipes.md has it."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from trnslurm.contract.checkpoints import checkpoints_in
from trnslurm.train.checkpoint.manifest import verify
from trnslurm.train.checkpoint.reading import parameter_reader
from trnslurm.train.errors import TrainError

from .conftest import JOB, REPO
from .launches import Launches, Scenario, assert_bitwise, assert_same

STEPS = 6
# Four units of two samples: three workers have two of padding.
SHAPE = {
    "batch__micro_batch": 2, "steps": STEPS, "train__eval_every": 3, "train__save_every": 1,
    "train__keep_last": STEPS, "model__n_layer": 2,
}  # fmt: skip
NO_DROPOUT = {f"model__{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}
LION = '''

class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, arXiv:2302.06675."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if not self.state[each]:
                    self.state[each]["moment"] = torch.zeros_like(each)
                moment, (beta1, beta2) = self.state[each]["moment"], group["betas"]
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.sub_(moment.lerp(each.grad, 1 - beta1).sign(), alpha=group["lr"])
                moment.lerp_(each.grad, 1 - beta2)
'''


def changed(script: str) -> str:
    """Apply the diffs of the page's section."""
    page = (REPO / "docs/recipes.md").read_text()
    section = page.partition("## Change the training step")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^    [-+ ].*\n)+", section, re.MULTILINE)
    diffs = [block for block in blocks if re.search(r"^    [-+]", block, re.MULTILINE)]
    assert len(diffs) == 10
    for diff in diffs:
        lines = [line[4:] for line in diff.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert script.count(before) == 1, f"{script.count(before)} times:\n{before}"
        script = script.replace(before, after)
    main = "\n\ndef main() -> None:"
    return script.replace(main, LION + main)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    directory = tmp_path_factory.mktemp("changed")
    job = directory / "jobs" / JOB.name
    shutil.copytree(JOB, job)
    script = job / "train.py"
    script.write_text(changed(script.read_text()))
    launches = Launches(directory, JOB / "text.txt", job)
    shape = SHAPE | NO_DROPOUT | {"train__lr": 1e-3}
    launches.launch(
        1, Scenario("whole", shape), Scenario("moved", shape | {"train__stop_at": 2}), device="cpu"
    )
    launches.launch(3, Scenario("moved", shape | {"train__stop_at": 4}), device="cpu")
    launches.launch(2, Scenario("moved", shape), device="cpu")
    return launches


@pytest.fixture(scope="module")
def muon(tmp_path_factory):
    """GPT-2's own recipe with Muon, on one to three workers, and on changing ones."""
    launches = Launches(tmp_path_factory.mktemp("muon"), JOB / "text.txt")
    shape = SHAPE | NO_DROPOUT | {"train__optimizer": "muon"}
    bf16 = shape | {"precision": "bf16", "train__stop_at": 2}
    launches.launch(
        1, Scenario("1", shape), Scenario("moved", shape | {"train__stop_at": 2}), device="cpu"
    )
    launches.launch(
        2, Scenario("2", shape), Scenario("again", shape | {"train__stop_at": 3}),
        Scenario("again", shape), Scenario("bf16", bf16), device="cpu",
    )  # fmt: skip
    launches.launch(
        3, Scenario("3", shape), Scenario("moved", shape),
        Scenario("bf16", bf16 | {"train__stop_at": 4}), device="cpu",
    )  # fmt: skip
    return launches


def saved(launches, name, kind="parameter"):
    [newest, *_] = checkpoints_in(launches.directory / name / "checkpoints")
    manifest = verify(newest)
    read = parameter_reader(newest, manifest, kind)
    return {name: read(name) for name in manifest.shapes}


def test_all_changes_together_give_the_same_on_other_workers(launches):
    moved, whole = launches.outcome("moved"), launches.outcome("whole")
    assert_same(moved, whole, ("loss", "z_loss", "grad_norm", "c_attn_std"), rel=1e-4)
    assert whole.column("loss")[-1] < whole.column("loss")[0]
    for name, tensor in saved(launches, "whole", "ema").items():
        assert torch.allclose(saved(launches, "moved", "ema")[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_auxiliary_loss_is_a_mean_over_its_own_count(launches):
    """At the start all logits are nearly 0: the logarithm of the sum is that of the vocabulary."""
    z_loss = launches.outcome("moved").column("z_loss")[0]
    assert z_loss == pytest.approx(torch.tensor(257.0).log().item() ** 2, rel=0.02)


def test_averages_are_between_the_first_and_the_last_weights(launches, run_export, tmp_path):
    run_export(launches.job, launches.directory / "moved", "--output", tmp_path, "--weights=ema")
    exported = load_file(tmp_path / "model.safetensors")
    averages = saved(launches, "moved", "ema")
    [first, *_] = [parameters for _, parameters in launches.saved("moved")]
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(exported[name], averages[name])
    last = saved(launches, "moved")[name]
    assert 0 < (averages[name] - first[name]).norm() < 0.2 * (last - first[name]).norm()
    with pytest.raises(TrainError, match="no weights named 'mean'"):
        run_export(launches.job, launches.directory / "moved", "--weights=mean")


def test_numbers_of_the_jobs_own_are_metrics_and_a_histogram(launches):
    [line, *_] = launches.outcome("whole").metrics
    assert line["tied"] == 1.0
    assert line["c_attn_min"] < line["c_attn_mean"] < line["c_attn_max"]
    events = b"".join(f.read_bytes() for f in (launches.directory / "whole/tensorboard").iterdir())
    assert b"c_attn" in events


def test_checkpoints_have_an_optimizers_state_whole_with_its_owner(launches):
    [checkpoint, *_] = checkpoints_in(launches.directory / "moved" / "checkpoints")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["kinds"] == ["parameter", "Lion"] and set(manifest["owners"].values()) == {0, 1}
    for rank, file in enumerate(sorted(checkpoint.glob("*.safetensors"))):
        own = {name for name, owner in manifest["owners"].items() if owner == rank}
        keys = load_file(file).keys()
        assert {key for key in keys if key.startswith("moment/")} == {f"moment/{n}" for n in own}


def test_muon_gives_the_same_losses_on_any_number_of_workers(muon):
    for name in ("2", "3", "moved"):
        assert_same(muon.outcome(name), muon.outcome("1"), ("loss",), rel=1e-6)
        assert_same(muon.outcome(name), muon.outcome("1"), ("grad_norm",), rel=1e-5)
    assert_bitwise(muon.outcome("again"), muon.outcome("2"), ("loss", "grad_norm"))
    assert len(muon.outcome("bf16").column("loss")) == 4


def test_workers_divide_the_state_of_muon(muon):
    whole, halves = (sum(r["state_bytes"] for r in muon.results(name)) for name in ("1", "2"))
    assert whole == halves
    assert max(result["state_bytes"] for result in muon.results("2")) < 0.55 * whole
