"""Lines of numbers: whole ones whatever happens, and a full disk that costs no more than lines."""

import resource
from types import SimpleNamespace

import pytest
import torch

from trnslurm.contract.rundir import RunFiles
from trnslurm.train.devices.device import Timer
from trnslurm.train.loop.job import TrainingJob
from trnslurm.train.loop.progress import Reporting, StepDone, StepReporter
from trnslurm.train.loop.reports import JsonLines

from ..json_lines import read_lines


def test_later_attempts_go_on_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        lines = JsonLines(path)
        lines.write({"step": step, "loss": float("nan")})
        lines.close()

    assert read_lines(path) == [{"step": 1, "loss": None}, {"step": 2, "loss": None}]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "", '{"step": 2}', "x" * 100_000])
def test_what_an_attempt_had_not_finished_is_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()

    assert read_lines(path) == [{"step": 1}, {"step": 3}]


def test_a_full_disk_costs_lines_and_one_warning(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, hard))
    try:
        lines.write({"step": 2})
        lines.write({"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.write({"step": 4})
    lines.close()

    assert read_lines(path) == [{"step": 1}, {"step": 4}]
    assert capsys.readouterr().out.count("warning: metrics.jsonl cannot be written") == 1


def test_a_file_that_cannot_be_opened_for_a_while_costs_lines(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    lines = JsonLines(path)
    lines.write({"step": 1})
    lines.write({"step": 2})
    path.rmdir()
    lines.write({"step": 3})
    lines.close()

    assert read_lines(path) == [{"step": 3}]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (Is a directory)") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_only_worker_0_is_asked_and_its_answer_comes_with_a_report(make_plan, tmp_path, rank):
    sent = []

    def total(values):
        sent.append(values)
        return [*values[:-1], 1.0]  # worker 0, whichever this is, says yes

    device = SimpleNamespace(
        rank=rank, timer=Timer(), total=total, memory=dict, graphs=lambda: 0,
        graphs_missed=lambda: None, fetch=list, say=lambda line: None,
    )  # fmt: skip
    environment = SimpleNamespace(attempt=1, phase="train", files=RunFiles(tmp_path))
    job = TrainingJob(
        plan=make_plan(units=4, workers=2),
        settings=SimpleNamespace(log_every=3),
        environment=environment,
        device=device,
    )
    progress = StepReporter(job, Reporting(), steps=range(1, 7))
    numbers = {"loss": torch.ones(1), "grad_norm": torch.ones(()), "lr": 0.1}
    answers = [progress.note(StepDone(step=step, **numbers), flag=True) for step in range(1, 7)]
    progress.close()

    assert answers == [True, True, True, False, False, True]
    assert [values[-1] for values in sent] == [float(rank == 0)] * 4
    assert {len(values) for values in sent} == {4}, "the graph of the sum"
