"""What a worker leaves behind when it dies."""

import json
import os
import time
from pathlib import Path

import pytest

from trnslurm.train.errors import TrainError
from trnslurm.train.loop import job
from trnslurm.train.loop.job import run_job


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The state directory of a run in which this process is worker 3."""
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "GROUP_RANK": 1, "TRNSLURM_ATTEMPT": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(job, "APART_S", 0)
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def fail(error):
    def main():
        job._timer.begin(41)
        raise error

    return main


def test_an_error_of_the_user_is_noted_before_it_is_said(state, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(time, "sleep", lambda _: seen.extend(p.name for p in state.iterdir()))
    with pytest.raises(SystemExit, match="1"):
        run_job(fail(TrainError("no data: prepare some")))

    assert seen == ["failed-train-2-rank3.json"]
    said = json.loads((state / seen[0]).read_text())
    assert {key: said[key] for key in ("rank", "node", "pid", "step", "error")} == {
        "rank": 3, "node": 1, "pid": os.getpid(), "step": 41, "error": "no data: prepare some",
    }  # fmt: skip
    assert "TrainError: no data" in said["traceback"] and abs(time.time() - said["time"]) < 60
    assert capsys.readouterr().err == "error: no data: prepare some\n"


def test_any_other_error_is_noted_and_goes_on_its_way(state):
    with pytest.raises(ZeroDivisionError):
        run_job(fail(ZeroDivisionError("two\nlines")))
    said = json.loads((state / "failed-train-2-rank3.json").read_text())
    assert said["error"] == "ZeroDivisionError: two"
    assert (said["steps_done"], said["raised"]) == (0, ["ZeroDivisionError"])
    assert "in main" in said["traceback"]


def test_steps_and_what_is_behind_an_error_are_noted(state):
    """Also what `from None` hides: triage must know that a file was at fault."""

    def main():
        job._timer.begin(41)
        job._timer.end_step()
        try:
            Path("nothing").read_text()
        except OSError:
            raise TrainError("no data") from None

    with pytest.raises(SystemExit):
        run_job(main)
    said = json.loads((state / "failed-train-2-rank3.json").read_text())
    raised = ["trnslurm.train.errors.TrainError", "FileNotFoundError"]
    assert (said["steps_done"], said["raised"]) == (1, raised)


@pytest.mark.parametrize("obstacle", ["no directory", "not writable", "no worker"])
def test_a_record_that_cannot_be_made_changes_nothing(state, monkeypatch, obstacle):
    if obstacle == "no directory":
        state.rmdir()
    elif obstacle == "not writable":
        (state / "failed-train-2-rank3.json").mkdir()
    else:
        monkeypatch.delenv("RANK")
    with pytest.raises(SystemExit, match="1"):
        run_job(fail(TrainError("no data")))
    if state.exists():
        assert [p.name for p in state.iterdir() if p.is_file()] == []
