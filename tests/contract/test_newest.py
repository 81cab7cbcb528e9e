"""With which checkpoint the next attempt of a custom script begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trnslurm.contract.checkpoints import Newest, has_saved, newest, newest_step, reported_step
from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles

TRAINER, NAMED = "work/out/checkpoint-10", "checkpoints/step-00000020"


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A run whose script takes {resume}, and a checkpoint of Trainer at the time of 1000 s."""
    run = RunFiles(tmp_path)
    for name in ("state", "code/project", TRAINER):
        (run.path / name).mkdir(parents=True)
    write_json(run.project_file, {})
    (run.path / "train.sh").write_text("#!\nexport TRNSLURM_RESUMES=told\n")
    state = run.path / TRAINER / "trainer_state.json"
    state.write_text("{\n}\n")
    os.utime(state, (1000, 1000))
    return run


def test_what_a_library_wrote_counts_if_the_script_takes_it(run: RunFiles) -> None:
    found = Newest(run.path / TRAINER, 10, "Trainer", 1000.0)
    assert newest(run) == found and found.name == "checkpoint-10 of Trainer"
    assert (newest_step(run), reported_step(run), has_saved(run)) == (10, 0, True)
    (run.path / "train.sh").write_text("#!\n")
    assert newest(run) is None and not has_saved(run) and newest_step(run) == 0
    assert newest(run, takes=True) == found
    (run.path / "train.sh").write_text("\nexport TRNSLURM_RESUMES=looks\n")
    assert newest(run) == found
    run.project_file.unlink()  # a recipe's own checkpoints are told by their names
    assert newest(run) is None


def test_a_report_counts_more(run: RunFiles) -> None:
    mine = run.path / "mine.pt"
    mine.touch()
    write_json(run.saved_file, {"step": 5, "path": str(mine), "attempt": 1})
    assert newest(run) == Newest(mine, 5)
    mine.unlink()  # by whoever cleans up
    assert newest(run, takes=True) == Newest(run.path / TRAINER, 10, "Trainer", 1000.0)
    named = run.path / NAMED
    named.mkdir(parents=True)
    assert newest(run) == Newest(named, 20) and newest_step(run) == 20
    (named / "model.pt").write_bytes(b"PK\x03\x04")  # named before it is whole, as litgpt does
    assert newest_step(run) == 5


def test_what_was_fetched_counts_until_the_script_saves(run: RunFiles) -> None:
    fetched = run.path / "fetched"
    fetched.mkdir()
    write_json(run.saved_file, {"step": 5, "path": str(fetched), "attempt": 0})
    os.utime(run.saved_file, (2000, 2000))
    assert newest(run) == Newest(fetched, 5)
    os.utime(run.saved_file, (999, 999))
    assert newest(run) == Newest(run.path / TRAINER, 10, "Trainer", 1000.0)


def test_a_checkpoint_without_a_step(run: RunFiles) -> None:
    (run.path / TRAINER).rename(run.path / "work/checkpoint-x")
    (run.path / "work/last.bin").write_bytes(b"x")
    script = "#!\nexport TRNSLURM_RESUMES=told\nexport TRNSLURM_CHECKPOINT_GLOB='l*.bin'\n"
    (run.path / "train.sh").write_text(script)
    assert newest(run) is None
    os.utime(run.path / "work/last.bin", (1000, 1000))
    write_json(run.state_file("train", 1), {"started": "1970-01-01T00:16:00Z"})
    os.utime(run.state_file("train", 1), (1001, 1001))
    assert newest(run) is None
    run.heartbeat_file.touch()
    one = newest(run)
    assert one == Newest(run.path / "work/last.bin", 0, "the pattern l*.bin", 1000.0)
    assert has_saved(run) and newest_step(run) == 0 and not one.is_alone
