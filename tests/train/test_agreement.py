"""Workers whose parameters differ in a single bit do not agree."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trnslurm.train.devices.device import Device
from trnslurm.train.errors import TrainError
from trnslurm.train.loop.run import all_equal, conclude


class TwoWorkers:
    """Answers as a device whose other worker holds other_values."""

    rank = 0
    say = Device.say

    def __init__(self, other_values=None):
        self.other_values = other_values
        self.values = None

    def largest(self, values):
        self.values = list(values)
        return [max(pair) for pair in zip(values, self.other_values or values, strict=True)]


def make_model(change=0.0):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] += change
    return model


def agree(model, other):
    device = TwoWorkers()
    all_equal(device, other.parameters())
    return all_equal(TwoWorkers(device.values), model.parameters())


def test_equal_parameters_agree():
    assert agree(make_model(), make_model())


def test_the_smallest_difference_is_seen_by_both_workers():
    assert not agree(make_model(), make_model(change=1e-7))
    assert not agree(make_model(change=1e-7), make_model())


@pytest.mark.parametrize("rounding", ["", "0", "1"])
def test_a_difference_is_an_error_unless_devices_round_stochastically(
    rounding, monkeypatch, capsys
):
    other = TwoWorkers()
    all_equal(other, make_model(change=1e-7).parameters())
    device = TwoWorkers(other.values)
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", rounding)
    training = SimpleNamespace(phase="train")
    if rounding == "1":
        conclude(device, make_model().parameters(), "parameters", training)
        assert "ranks differ in parameters: they round stochastically" in capsys.readouterr().out
        return
    with pytest.raises(TrainError, match="differ at the end: this run is not valid"):
        conclude(device, make_model().parameters(), "parameters", training)
