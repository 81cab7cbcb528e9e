"""A command that runs on the first node only: its environment, its signals and its end."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trnslurm.node.once import Wish, given_environment, went_on

from ..waiting import eventually

PROGRAM = """
import argparse, sys
from trnslurm.node import once

class Meets:
    number = int(sys.argv[1])
    def leave(self):
        print("left", flush=True)

parser = argparse.ArgumentParser()
once.add_options(parser)
parser.add_argument("words", nargs="+")
options = parser.parse_args(sys.argv[2:])
sys.exit(once.Once(Meets(), options.words, options).run())
"""


def packed(**values: str) -> str:
    return base64.b64encode("\0".join(f"{k}={v}" for k, v in values.items()).encode()).decode()


def start(run: Path, node: int, *words: str, **variables: str) -> subprocess.Popen[str]:
    environ = os.environ | {"TRNSLURM_RUN_DIR": str(run), "TRNSLURM_ATTEMPT": "1"} | variables
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(node), *words],
        env=environ, cwd=run, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_given_environment_is_the_submitters_and_the_runs() -> None:
    given = packed(A="1\n2", PATH="/x", PYTHONPATH="/mine", SLURM_NTASKS="8", SLURM_OPEN_MODE="a")
    found = given_environment(
        {"TRNSLURM_GIVEN": given, "TRNSLURM_RUN_DIR": "/run", "PATH": "/ours", "LD_X": "1",
         "PYTHONPATH": "/run/z/startup:/run/work", "HF_HOME": "/hf", "SLURM_NTASKS": "2"},
        ["HF_HOME"],
    )  # fmt: skip
    assert found == {
        "A": "1\n2", "PATH": "/x:/ours", "PYTHONPATH": "/run/z/startup:/run/work:/mine",
        "SLURM_NTASKS": "8", "TRNSLURM_RUN_DIR": "/run", "HF_HOME": "/hf", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def test_the_first_node_runs_it_and_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    script = tmp_path / "job"
    script.write_text('#!/bin/bash\necho "$PWD $SLURM_SUBMIT_DIR $A $SLURM_NODEID"; exit 3\n')
    script.chmod(0o755)
    given = packed(A="1", PATH=os.environ["PATH"], SLURM_NODEID="0")
    run = start(tmp_path, 0, "--given", "--directory=there", "--", "./job", TRNSLURM_GIVEN=given)
    place = tmp_path / "there"
    assert run.communicate(timeout=60)[0] == f"{place} {place} 1 0\n"
    assert run.returncode == 3
    other = start(tmp_path, 1, "--", "./job")
    assert (other.communicate(timeout=60)[0], other.returncode) == ("left\n", 0)


def test_without_given_it_has_no_variable_of_the_step(tmp_path: Path) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "7"}
    run = start(tmp_path, 0, "--", "bash", "-c", "compgen -e SLURM; exit 0", **step)
    said = run.communicate(timeout=60)[0].split()
    assert {*said} >= {"SLURM_JOB_ID", "SLURM_PROCID", "left"}
    assert not {*said} & {"SLURM_STEP_ID", "SLURM_NTASKS"}


def test_the_script_gets_the_signal_that_it_wants(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    trap = 'trap "echo saved; exit 0" USR1; echo ready; while :; do sleep 0.1; done'
    run = start(tmp_path, 0, "--signal=B:USR1", "--", "bash", "-c", trap)
    assert run.stdout
    assert run.stdout.readline() == "ready\n"
    (tmp_path / "state/stop-train-1.json").write_text("{}")
    said = run.communicate(timeout=60)[0]
    assert said.splitlines()[-2:] == ["saved", "left"]


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1", "10", "R:USR1", "B:10"])
def test_a_signal_has_a_name_or_a_number(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TRNSLURM_ATTEMPT", "1")
    wish = Wish(name)
    assert wish.open
    assert wish._signum == signal.SIGUSR1
    assert not Wish("").open


def test_term_ends_it(tmp_path: Path) -> None:
    run = start(tmp_path, 0, "--", "bash", "-c", "echo ready; exec sleep 1000")
    assert run.stdout
    assert run.stdout.readline() == "ready\n"
    run.terminate()
    eventually(lambda: run.poll() is not None)
    assert run.returncode == 143
    run.communicate()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("srun: error: node-2: task 3: Segmentation fault (core dumped)\nfinished\n",
         "task 3 on node-2: Segmentation fault (core dumped)"),
        ("srun: error: node-1: tasks 0-1: Exited with exit code 2\n",
         "tasks 0-1 on node-1: Exited with exit code 2"),
        ("srun: Job 7 step creation temporarily disabled, retrying\n", ""),
        ("it said: srun: error: node-1: task 0: Killed\n", ""),
    ],
)  # fmt: skip
def test_a_script_that_goes_on_after_its_srun_failed(tmp_path: Path, said: str, words: str) -> None:
    (log := tmp_path / "log").write_text(f"step 1\n{said}done\n")
    found = went_on(log)
    assert found == (words and f"its srun failed, but the script continued: {words}")
    assert went_on(tmp_path / "none") == ""
