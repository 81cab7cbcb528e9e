"""Graphs that come late: counted in the metrics, and warned about once."""

from types import SimpleNamespace

import pytest
import torch

from trnslurm.train.devices.device import Device, Timer
from trnslurm.train.environment import Environment
from trnslurm.train.loop.job import TrainingJob
from trnslurm.train.loop.progress import Reporting, StepDone, StepReporter, _format

from ..json_lines import read_lines


class Counting:
    """A device whose counters of graphs a test sets."""

    rank = 0
    say = Device.say

    def __init__(self, asked_of_cache: bool) -> None:
        self.timer = Timer()
        self.compiled = 0
        self.missed = 0 if asked_of_cache else None

    def total(self, values):
        return list(values)

    def fetch(self, tensors):
        return list(tensors)

    def graphs(self):
        return self.compiled

    def graphs_missed(self):
        return self.missed

    def memory(self):
        return {}


@pytest.mark.parametrize(
    ("asked_of_cache", "late", "warned_at"),
    [(True, [1, 1, 1, 3], 1), (False, [0, 0, 0, 2], 4)],
    ids=["the cache knows", "what came after the first steps"],
)
def test_late_graphs(make_plan, tmp_path, capsys, asked_of_cache, late, warned_at):
    device = Counting(asked_of_cache)
    environment = Environment(
        rank=0, world=1, local_rank=0, local_world=1, phase="train", attempt=1,
        run_dir=tmp_path, device="xla-cpu",
    )  # fmt: skip
    plan = make_plan(units=4, workers=1)
    settings = SimpleNamespace(log_every=1)
    job = TrainingJob(plan=plan, settings=settings, environment=environment, device=device)
    progress = StepReporter(job, Reporting(), steps=range(1, 6))
    # Of the ten first graphs one was not in the cache; two come in the middle of the training.
    for step, compiled in enumerate((10, 11, 11, 13), 1):
        device.compiled = compiled
        if asked_of_cache:
            device.missed = 1 if compiled < 13 else 3
        progress.note(StepDone(step=step, loss=torch.ones(1), grad_norm=torch.ones(1), lr=0.1))
        assert ("warning:" in capsys.readouterr().out) == (step == warned_at)
    progress.close()

    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["late_graphs"] for line in lines] == late
    assert "graphs compiled after step 2: 2" in capsys.readouterr().out


def test_the_perplexity_of_a_loss_that_exploded_is_short():
    line = {"step": 1, "steps": 2, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "eval_loss": 1.0}
    for perplexity, shown in ((12345.678, "12345.68"), (1.0142320547350045e304, "1.01e+304")):
        said = _format(line | {"perplexity": perplexity}, Reporting(rates={}))
        assert said.endswith(f"eval_loss 1.0000  perplexity {shown}")
