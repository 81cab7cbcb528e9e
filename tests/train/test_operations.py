"""What a step of GPT-2 asks PyTorch for on a CPU: no more operations than its model needs."""

import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from trnslurm.devices import CPU
from trnslurm.train.data.units import Unit
from trnslurm.train.devices.plain import TorchDevice
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.make import make_optimizer

from .conftest import JOB
from .measures import import_job, optimizer_settings

LAYERS, UNITS = 2, 3
MODEL = {"vocab_size": 257, "n_positions": 16, "n_embd": 32, "n_layer": LAYERS, "n_head": 2}
MODEL |= {"activation_function": "gelu_new"} | dict.fromkeys(
    ("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0
)


@pytest.fixture
def device(monkeypatch):
    """A worker alone in a real process group."""
    join = dist.init_process_group
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend: join(backend, store=dist.HashStore(), rank=0, world_size=1),
    )
    device = TorchDevice(CPU, types.SimpleNamespace(local_world=1))
    yield device
    dist.destroy_process_group()


def make(device, *, recompute=False):
    """Make a GPT-2; return it, and what computes a unit and its gradients."""
    job = import_job(JOB / "train.py")
    plan = types.SimpleNamespace(model=MODEL, seed=1, precision="fp32")
    settings = types.SimpleNamespace(init_from="", gradient_checkpointing=recompute)
    model = job.make_model(plan, settings, device)
    text = types.SimpleNamespace(samples=lambda first, size: torch.ones(size, 16, dtype=torch.long))
    unit = Unit(index=0, first=0, size=2, weight=1.0, seed=0)

    def backward():
        loss = job.unit_loss(model, device, plan, text, unit, 100)
        loss.backward()
        return loss.detach()

    return model, backward


@pytest.fixture
def counted(device):
    """How often each operation ran in a unit, and in the end of a step."""
    model, backward = make(device)
    optimizer = make_optimizer(
        optimizer_settings("adamw", weight_decay=0.1, beta2=0.99),
        device,
        model.named_parameters(),
    )

    def end():
        optimizer.step(1e-3)

    for _ in range(UNITS):  # the first step makes the optimizer's state
        backward()
    end()
    of_unit, of_end = count(backward), count(end)
    return of_unit, of_end, optimizer


def count(function):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    return Counter(event.key for event in profiled.events())


def test_a_unit_is_its_matrix_products_and_one_operation_for_each_other_part(counted):
    of_unit, _, _ = counted
    # Four matrices a layer, then the tied output's: forwards, and two ways backwards.
    assert of_unit["aten::addmm"] == 4 * LAYERS
    assert of_unit["aten::mm"] == 8 * LAYERS + 3
    for name in ("gelu", "gelu_backward", "_scaled_dot_product_flash_attention_for_cpu"):
        assert of_unit[f"aten::{name}"] == LAYERS, name
    # Neither a mask of scores, nor dropout of nothing, nor a number read back from the device.
    for name in ("_softmax", "tanh", "pow", "where", "masked_fill", "bernoulli_", "item"):
        assert of_unit[f"aten::{name}"] == 0, name


def test_a_step_ends_with_one_pass_for_each_group_and_one_sum_for_each_bucket(counted):
    _, of_end, optimizer = counted
    assert of_end["aten::_fused_adamw_"] == 2
    assert of_end["c10d::allreduce_"] == len(optimizer._summed._buckets) == 1
    assert of_end["aten::zero_"] == 1


# PyTorch's own look at the gradients of what a layer is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_compute_the_same_in_few_graphs(device, monkeypatch):
    # Else PyTorch starts a process for each processor, which imports it again.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    plain, backward = make(device)
    loss = backward()
    device.compiles = True
    before = device.graphs()
    compiled, backward = make(device, recompute=True)
    torch.testing.assert_close(backward(), loss, rtol=1e-6, atol=0)
    theirs = dict(compiled.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(theirs.pop(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
    assert not theirs
    # Layers share one; another is the loss'. The backward pass recomputes with gradients: a third.
    assert device.graphs() - before in (2, 3)
    with pytest.raises(TrainError, match="Linear has no layers to compile"):
        device.compile_layers(torch.nn.Linear(1, 1))
