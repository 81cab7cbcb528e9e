"""Many runs and jobs: what is read of them, how often, and how often Slurm is asked."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest

from trnslurm.contract import files
from trnslurm.contract.files import open_file, write_json
from trnslurm.runs import find
from trnslurm.runs.status import run_status
from trnslurm.slurm.commands import Slurm

DONE = {"precompile": [{"state": "COMPLETED"}], "train": [{"state": "COMPLETED"}]}
BUSY = {"precompile": [{"state": "COMPLETED"}], "train": [{"state": "RUNNING"}]}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each file was opened, as RUN/NAME."""
    opened: collections.Counter[str] = collections.Counter()
    real = open_file

    def count(file: Any) -> Any:
        opened["/".join(file.parts[-3:] if file.parent.name == "state" else file.parts[-2:])] += 1
        return real(file)

    monkeypatch.setattr(files, "open_file", count)
    return opened


def test_runs_reads_what_it_shows_and_asks_once(make_run, fake_slurm, cli, read) -> None:
    for number in range(25):
        busy = number % 2
        run = make_run(
            f"20260101-{number:06}-gpt", states=BUSY if busy else DONE, steps=30,
            jobs={"precompile": "7", "train": str(100 + number)},
        )  # fmt: skip
        lines = (f'{{"attempt": 1, "step": {n}, "loss": {n}}}\n' for n in range(9))
        run.metrics_file.write_text("".join(lines))
    fake_slurm.queue(*(f"{100 + n}|RUNNING|None|N/A|node-1" for n in range(1, 25, 2)))
    read.clear()
    done = cli("runs")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 21)
    assert [call.command for call in fake_slurm.calls()] == ["squeue"]
    names = [name for name in read if name.endswith("/run.json")]
    assert len(names) == 20 and "20260101-000004-gpt/run.json" not in names
    twice = {name: count for name, count in read.items() if count > 1}
    assert twice == {  # of what had not completed: before Slurm was asked, and after
        f"20260101-{number:06}-gpt/state/{phase}-1.json": 2
        for number in range(5, 25, 2)
        for phase in ("precompile", "train")
    }


def test_a_run_that_ends_while_slurm_answers_has_ended(make_run, monkeypatch) -> None:
    run = make_run(states=BUSY)

    def ended(*_: Any, **__: Any) -> dict[str, Any]:
        write_json(run.state_file("train", 1), {"state": "COMPLETED", "exit_code": 0})
        return {}

    monkeypatch.setattr(Slurm, "queue", ended)
    assert run_status(run).state == "COMPLETED"


def test_the_last_loss_is_found_without_reading_on(make_run, monkeypatch) -> None:
    run = make_run()
    run.metrics_file.write_text(
        '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3}\n{"step": 3, "eval_loss": 1}\n'
    )
    parsed = []
    real = files._parse
    monkeypatch.setattr(files, "_parse", lambda line: parsed.append(line) or real(line))
    assert run.last_metrics() == {"loss": 2, "step": 3, "eval_loss": 1}
    assert len(parsed) == 3


def test_last_looks_at_the_newest_run_first(make_run, cli, monkeypatch) -> None:
    for number in range(9):
        make_run(f"20260101-{number:06}-gpt", states=DONE)
    looked = itertools.count()
    monkeypatch.setattr(find, "is_ours", lambda _: next(looked) >= 0)
    assert cli("status", "last").out.startswith("20260101-000008-gpt")
    assert next(looked) == 1
