"""Runs that go on after their end: on another number of nodes, and after what Slurm did to them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

from trnslurm.records.run import RunDir
from trnslurm.submission.cancel import cancel

from ..json_lines import read_lines
from ..processes import run_process
from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

# Plain SGD: its losses show a gradient of the wrong size.
QUICK = ("device=cpu", "precompile=never", "model.n_layer=1", "train.eval_every=0",
         "train.optimizer=sgd", "train.lr=0.05", "train.save_every=10", "steps=100")  # fmt: skip
TRNSLURM = (sys.executable, "-m", "trnslurm")


def lines(run: Run) -> list[dict]:
    """The lines of its metrics so far."""
    return read_lines(run.path / "metrics.jsonl")


def losses(run: Run) -> dict[int, float]:
    """The loss of each step; what was done again counts once."""
    return {line["step"]: line["loss"] for line in lines(run)}


def test_cancelled_and_resumed_on_another_number_of_nodes(user) -> None:
    """Two people resume it at the same moment: it gets one job, and the losses of one run."""
    control = user.submit(*QUICK, nodes=1, recipe="gpt2_zero1")
    run = user.submit(*QUICK, nodes=2, recipe="gpt2_zero1")
    eventually(lambda: len(lines(run)) > 15)
    cancel(RunDir(run.path), now=True)  # in this process: training waits for no command to start
    run.until("CANCELLED")
    assert 10 < max(losses(run)) < 100

    resume = [*TRNSLURM, "resume", str(run.path), "--nodes", "1"]
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(resume, env=user.environment, stdout=PIPE, stderr=PIPE, text=True)
            )
            for _ in range(2)
        ]
        said = [(process.communicate(timeout=600), process.returncode) for process in both]
    assert sorted(code for _, code in said) == [0, 1], said
    places = user.sandbox.slurm("squeue", "--noheader", "--format=%Z").ok.splitlines()
    assert places.count(str(run.path)) == 1

    run.until("COMPLETED")
    control.until("COMPLETED")
    assert re.search(r"resuming from step-000000\d\d, written by 2 workers", run.logs("-n", "0"))
    assert losses(run).keys() == losses(control).keys() == set(range(1, 101))
    assert losses(run) == pytest.approx(losses(control), rel=1e-5)
    status = run.status()
    assert (status["nodes"], status["history"][0]["nodes"]) == (1, 2)
    assert [a["state"] for a in status["attempts"]] == ["CANCELLED", "COMPLETED"]
    assert status["mend"] == ""


def until_mendable(run: Run, state: str) -> None:
    """Wait until status names the command that mends it."""
    run.until(state)
    assert run.status()["mend"] == f"trnslurm resume {run.path.name}"


def test_what_slurm_does_not_mend(new_sandbox, tmp_path: Path) -> None:
    """A launch that fails; and a controller that loses all its jobs, in one sandbox of its own."""
    broken = tmp_path / "broken"
    prolog = tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e '{broken}' ]\n")
    prolog.chmod(0o755)
    with new_sandbox("--nodes", "2", "--set", f"Prolog={prolog}") as sandbox:
        user = User(sandbox, tmp_path)
        held_is_released(user, broken)
        lost_is_submitted_anew(user)


def held_is_released(user: User, broken: Path) -> None:
    """Slurm holds a job whose launch failed, and drains the node: another one serves."""
    broken.touch()
    run = user.submit("train.wait=true")
    until_mendable(run, "HELD")
    broken.unlink()
    assert user.trnslurm("resume", run.path) == (
        f"Released job {run.jobs['train']} of {run.path.name}\n"
    )
    run.until_there(1)
    run.go()
    run.until("COMPLETED")
    user.sandbox.clean()


def lost_is_submitted_anew(user: User) -> None:
    """A pending run whose job the controller has lost; resumed while that restarts, and after."""
    sandbox = user.sandbox
    blocker = user.submit("train.wait=true", nodes=2)
    blocker.until_there(2)
    run = user.submit("train.wait=true")
    sandbox.fault("ctld", "kill")
    refused = run_process([*TRNSLURM, "resume", str(run.path)], env=user.environment)
    assert (refused.code, len(refused.err.splitlines())) == (1, 1), refused
    for file in (sandbox.path / "state/slurmctld").iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    sandbox.fault("ctld", "start")
    until_mendable(run, "LOST")
    watching = [*TRNSLURM, "watch", str(run.path), "--resume", "--every", "1s"]
    with subprocess.Popen(watching, env=user.environment, stdout=PIPE, text=True) as watch:
        run.go()
        out, _ = watch.communicate(timeout=600)
    assert watch.returncode == 0, out
    said = [line.partition("Z ")[2] for line in out.splitlines()]
    # Until the nodes have registered with the new controller, it has none for the job.
    said = [line for line in said if not line.startswith("warning: ")]
    assert said[0].startswith("LOST") and said[2].startswith("Resumed")
    assert said[1].endswith(" has no checkpoint, so it starts from the beginning")
    assert len(run.status()["history"]) == 1
