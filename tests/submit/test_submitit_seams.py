"""The private seams of submitit that are used, frozen: they may change with any other version."""

from __future__ import annotations

import importlib.metadata
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from trnslurm.schedulers.local.start import GuardedLocal
from trnslurm.schedulers.slurm.start import RenderedSlurm


@pytest.fixture(autouse=True)
def nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was pickled")

    monkeypatch.setattr(utils.DelayedSubmission, "dump", refuse)
    monkeypatch.setattr(utils, "cloudpickle_dump", refuse)
    monkeypatch.setattr(pickle, "dump", refuse)


def test_version() -> None:
    assert importlib.metadata.version("submitit") == "1.5.4"


def test_job_id_is_read_from_sbatchs_words() -> None:
    read = SlurmExecutor._get_job_id_from_submission_command
    assert read("Submitted batch job 4711") == "4711"
    assert read("Submitted batch job 4711 on cluster two") == "4711"
    with pytest.raises(utils.FailedSubmissionError):
        read("queued")


def test_slurm_submission_hands_our_script_to_our_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    folder = tmp_path / "folder"
    folder.mkdir()
    seen = tmp_path / "seen"
    program = f'for f; do :; done; cp "$f" {seen}; echo "$1 $2" > {seen}.argv; echo job 12'
    script = tmp_path / "script"
    script.write_bytes(b"#!/bin/bash\n# exactly this \xff\r\n")
    executor = RenderedSlurm(str(folder), script, ["sh", "-c", program, "sh", "--a", "--b"])
    assert executor.send() == "12"
    assert seen.read_bytes() == script.read_bytes()
    assert Path(f"{seen}.argv").read_text() == "--a --b\n"
    assert [f.name for f in folder.rglob("*") if "pkl" in f.name or "pickle" in f.name] == []


def test_failure_carries_words_and_exit_code(tmp_path: Path) -> None:
    argv = ["sh", "-c", "echo no >&2; exit 124", "sh"]
    executor = RenderedSlurm(str(tmp_path), tmp_path / "script", argv)
    with pytest.raises(utils.FailedJobError, match="no") as failure:
        executor.send()
    cause = failure.value.__cause__
    assert isinstance(cause, subprocess.CalledProcessError)
    assert cause.returncode == 124


def test_srun_need_not_be_on_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert RenderedSlurm.affinity() > 0
    RenderedSlurm(str(tmp_path), tmp_path / "script", [])


def test_submission_asks_no_watcher(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the watcher was asked")

    monkeypatch.setattr(SlurmJob.watcher, "update", refuse)
    RenderedSlurm(str(tmp_path), tmp_path / "script", ["echo", "job 1"]).send()


def test_local_submission_runs_our_command_and_pickles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    program = "import os, sys; print(os.environ['SUBMITIT_EXECUTOR'], sys.argv[1:])"
    command = shlex.join([sys.executable, "-c", program, "it's", "a b"])
    job = GuardedLocal(folder)._submit_command(command)
    assert job._process.wait(timeout=600) == 0
    (out,) = folder.glob("*.out")
    assert out.read_text() == "local [\"it's\", 'a b']\n"
    assert out.name == f"{job.job_id}_0_log.out"
    assert {f.suffix for f in folder.iterdir()} == {".out", ".err"}
