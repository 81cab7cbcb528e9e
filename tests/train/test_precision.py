"""In which precision an optimizer works: what is lost in bf16, what is not, what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trnslurm.devices import CPU
from trnslurm.train.devices.device import Timer
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.make import make_optimizer

from .conftest import run_workers
from .measures import optimizer_settings
from .precision_worker import LR, OPTIMIZER_PRECISIONS, STEPS, train

pytestmark = pytest.mark.rest

WORKER = Path(__file__).with_name("precision_worker.py")
BF16, FP32 = "torch.bfloat16", "torch.float32"


@pytest.fixture(scope="module")
def cpu():
    """A device without other workers."""
    device = SimpleNamespace(
        kind=CPU, rank=0, world=1, timer=Timer(), torch_device=torch.device("cpu"),
        sync=lambda: None, graphs=lambda: 0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallel, "_reduce", lambda self: None)
        yield device


@pytest.fixture(scope="module")
def on_xla(tmp_path_factory):
    """Give what the cases left on torch_xla."""
    directory = tmp_path_factory.mktemp("precision")
    done = run_workers(1, WORKER, "xla-cpu", cwd=directory, device="xla-cpu")
    assert done.returncode == 0, done.stdout
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(case["name"] + "+zero1" * case["zero1"], case["precision"]): case for case in cases}


def check(case):
    """The steps go in one direction, and each is too small for bf16."""
    precision, saved = case["precision"], case["saved"]
    kept = case["types"]["parameter"]
    if precision == "fp32_copy":
        assert saved["parameter"] == pytest.approx(1 - STEPS * LR, rel=1e-3)
        assert case["parameter"] == torch.tensor(saved["parameter"]).bfloat16().item() < 1
    else:
        assert case["parameter"] == saved["parameter"] == 1
    assert kept == (FP32 if precision == "fp32_copy" else BF16)
    assert case["types"]["exp_avg"] == (BF16 if precision == "as_model" else FP32)
    exact = pytest.approx(1 - 0.999**STEPS, rel=1e-5)
    assert (saved["exp_avg_sq"] == exact) == (precision != "as_model")
    assert case["late_graphs"] == 0


@pytest.mark.parametrize("precision", OPTIMIZER_PRECISIONS)
def test_small_updates_of_bf16_live_in_a_copy_only(cpu, on_xla, precision):
    check(train("adamw", precision, cpu))
    check(on_xla["adamw", precision])


@pytest.mark.parametrize("precision", ["fp32_copy", "as_model"])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_zero1_divides_copies_or_the_parameters_themselves(on_xla, name, precision):
    """torch_xla's optimizer_dtype: what it updates, and keeps in checkpoints, is in that type."""
    check(on_xla[f"{name}+zero1", precision])


def test_adam_decays_with_the_gradient_as_pytorchs(cpu):
    """AdamW would take the decay from the parameter itself."""
    parameter, other = (torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3)) for _ in range(2))
    settings = optimizer_settings("adam", weight_decay=0.1)
    optimizer = make_optimizer(settings, cpu, [("weight", parameter)], zero1=False)
    betas = (settings.beta1, settings.beta2)
    plain = torch.optim.Adam([other], lr=0.1, betas=betas, eps=settings.eps, weight_decay=0.1)
    for _ in range(5):
        for each in (parameter, other):
            (each**2).sum().backward()
        torch.nn.utils.clip_grad_norm_([other], settings.max_norm or 1e9)
        optimizer.step(0.1)
        plain.step()
        plain.zero_grad()
    assert torch.allclose(parameter, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("precision", "norm"), [("fp32_copy", 2.0), ("fp32_state", 2.0), ("as_model", 1.0)]
)
def test_gradients_of_many_units_add_up_beside_a_copy(cpu, precision, norm):
    """Half of 512 equal parts is where bf16 has no room for one more."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = make_optimizer(
        optimizer_settings("sgd", max_norm=100.0), cpu, [("p", parameter)], zero1=False,
        precision=precision,
    )  # fmt: skip
    for _ in range(2):  # the second step begins at zero again
        for _ in range(512):
            (parameter / 512).sum().backward()
        assert optimizer.step(0.0).item() == norm


@pytest.mark.parametrize(("max_norm", "left"), [(0.0, 1.0), (1.0, 0.5), (4.0, 1.0)])
def test_gradients_are_clipped_unless_the_norm_is_0(cpu, max_norm, left):
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = make_optimizer(
        optimizer_settings("sgd", max_norm=max_norm), cpu, [("p", parameter)], zero1=False
    )
    parameter.sum().backward()
    assert optimizer.step(1.0).item() == 2
    assert parameter.tolist() == pytest.approx([-left] * 4, rel=1e-5)


@pytest.mark.parametrize("precision", OPTIMIZER_PRECISIONS)
def test_lamb_takes_each_as_well(on_xla, precision):
    case = on_xla["lamb", precision]
    assert case["types"]["exp_avg"] == (BF16 if precision == "as_model" else FP32)
    assert case["late_graphs"] == 0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_in_fp32_all_are_the_same(cpu, name):
    cases = [train(name, precision, cpu, torch.float32) for precision in OPTIMIZER_PRECISIONS]
    assert {case["parameter"] for case in cases} == {cases[0]["parameter"]} != {1.0}
    assert all(case["saved"] == cases[0]["saved"] for case in cases)


@pytest.mark.parametrize(("name", "precision"), [("adamw", "fp32_state"), ("lamb", "fp32_copy")])
def test_what_a_job_did_not_declare_is_refused_all_the_same(name, precision):
    with pytest.raises(TrainError, match=f"{name} with {precision} is incompatible with ZeRO-1"):
        make_optimizer(optimizer_settings(name), None, [], precision=precision)
