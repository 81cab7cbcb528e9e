"""Gradients are sent while the backward pass goes on: when, in which order, and when not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from trnslurm.train.errors import TrainError
from trnslurm.train.optim import gradients as room
from trnslurm.train.optim.gradients import Buckets


class Work:
    def wait(self):
        """Be done."""


@pytest.fixture
def sent(monkeypatch):
    """Sums with no other worker: what was sent, as a copy of its values at that time."""
    values = []

    def all_reduce(bucket, async_op):
        values.append(bucket.clone())
        return Work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(room, "_bucket_bytes", lambda whole: 1)  # one for each parameter
    return values


def make(layers):
    parameters = list(nn.ModuleList(layers).parameters())
    buckets = Buckets(parameters, torch.float32)
    for parameter, gradient in buckets.gradients.items():
        parameter.grad = gradient
    return parameters, buckets


def step(buckets, backward, sent, units=2):
    """Run a step; return how many buckets were sent before each unit, and before the end."""
    sent.clear()
    buckets.whole.zero_()
    before = []
    for unit in range(units):
        if unit == units - 1:
            buckets.begin_last_unit()
        before.append(len(sent))
        backward()
    before.append(len(sent))
    buckets.all_reduce()
    return before


def test_the_last_unit_of_later_steps_sends_what_is_complete(sent):
    layers = [nn.Linear(3, 3, bias=False) for _ in range(4)]
    parameters, buckets = make(layers)
    on_the_way = []
    # By the time the first layer's input has its gradient, all layers behind it have theirs.
    x = torch.ones(1, 3, requires_grad=True)
    x.register_hook(lambda _: on_the_way.append(len(sent)))

    def backward():
        y = x
        for layer in layers:
            y = layer(y)
        y.sum().backward()

    assert step(buckets, backward, sent) == [0, 0, 0]  # the first learns
    assert step(buckets, backward, sent) == [0, 0, 4]
    assert on_the_way[-1] >= 3
    for bucket, parameter in zip(sent, reversed(parameters), strict=True):
        assert torch.equal(bucket.view(3, 3), parameter.grad)
    assert step(buckets, backward, sent, units=1) == [0, 4]


def test_layers_that_are_recomputed_may_share_a_parameter(sent):
    """Each recomputed part adds to it in a backward pass of its own."""
    shared, first = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    parameters, buckets = make([first, shared])

    def backward():
        y = first(torch.ones(1, 3))
        for _ in range(3):
            y = checkpoint(shared, y, use_reentrant=True)
        y.sum().backward()

    for _ in range(3):
        before = step(buckets, backward, sent)
    assert before == [0, 0, 2]
    assert torch.equal(sent[0].view(3, 3), parameters[1].grad)


def test_one_order_on_all_workers_whatever_comes_first(sent):
    first, second, unused = (nn.Linear(1, 1, bias=False) for _ in range(3))
    parameters, buckets = make([first, second, unused])

    def backward():
        # `second` lies before `first` in memory, but has its gradient later here.
        first(second(torch.ones(1, 1))).sum().backward()

    step(buckets, backward, sent)
    assert step(buckets, backward, sent) == [0, 0, 3]
    assert [bucket.item() for bucket in sent] == [0, parameters[1].grad, parameters[0].grad]


def test_a_graph_that_grows_is_refused_and_one_that_shrinks_waits(sent):
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    _, buckets = make(layers)

    def both():
        layers[1](layers[0](torch.ones(1, 1))).sum().backward()

    def first_only():
        layers[0](torch.ones(1, 1)).sum().backward()

    step(buckets, both, sent)
    assert step(buckets, first_only, sent) == [0, 0, 0]
    assert len(sent) == 2

    def twice():
        both()
        both()

    with pytest.raises(TrainError, match="must not change from step to step"):
        step(buckets, twice, sent)


def test_buckets_end_where_parameters_do_and_hold_every_gradient_once(monkeypatch):
    monkeypatch.setattr(room, "_bucket_bytes", lambda whole: 40)
    parameters, buckets = make([nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 2)])
    assert [len(bucket) for bucket in buckets._buckets] == [2 + 2 + 1 + 3 + 3, 9]
    assert sum(map(torch.numel, parameters)) == len(buckets.whole)
    assert [parameter.shape for parameter in parameters] == [p.grad.shape for p in parameters]


@pytest.mark.parametrize(("total", "size"), [(2, 1), (16, 2), (4096, 25)])
def test_buckets_are_an_eighth_of_all_within_bounds(total, size):
    whole = torch.empty(total << 20, dtype=torch.uint8, device="meta")
    assert room._bucket_bytes(whole) == size << 20
