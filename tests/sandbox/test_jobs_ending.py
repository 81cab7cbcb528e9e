"""Runs that end before their time: cancelled, failed in one worker, failed in the first phase."""

from __future__ import annotations

import json

import pytest

from ..json_lines import read_lines
from ..waiting import eventually

pytestmark = pytest.mark.rest


def test_cancel_while_pending(user) -> None:
    """All nodes are taken: neither phase ever starts, and nothing of the chain stays behind."""
    sleeper = ("--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    user.sandbox.slurm("sbatch", *sleeper)
    run = user.submit("precompile=always", nodes=2)
    # For a moment Slurm gives other reasons, and 24.05 drops one at times.
    waiting = ("PENDING", "precompile: waiting for free nodes")
    eventually(lambda: (run.status()["state"], run.status()["reason"]) == waiting)
    eventually(lambda: run.phase("train")["reason"] == "waiting for the precompile job")

    assert "Cancelled" in user.trnslurm("cancel", str(run.path))
    assert run.status()["state"] == "CANCELLED"
    assert [line.split()[2] for line in user.sandbox.queue()] == ["RUNNING"]  # the sleeper
    user.sandbox.clean()
    assert run.status()["state"] == "CANCELLED"
    assert list(run.path.glob("state/*-1.json")) == []


def test_cancel_while_running(user) -> None:
    """Workers that do not heed TERM, as in a hung collective, end as well, on every node."""
    run = user.submit("precompile=always", "train.wait=true", "train.deaf=true", nodes=2)
    run.until_there(2, phase="precompile")
    assert run.status()["state"] == "PRECOMPILING"
    assert len({line[:1] for line in user.sandbox.processes_of(run)}) == 2

    user.trnslurm("cancel", str(run.path))
    eventually(lambda: not user.sandbox.queue())
    assert user.sandbox.processes_of(run) == []
    assert run.status()["state"] == "CANCELLED"
    assert [p["state"] for p in run.status()["phases"]] == ["CANCELLED", "CANCELLED"]
    assert run.facts() == {}
    assert "has already ended" in user.trnslurm("cancel", str(run.path))


def test_one_failing_worker_ends_the_run(user) -> None:
    """The others would wait for ever, and another attempt would fail in the same way.

    Its error is shown, not what torchrun makes of it, nor the exit code that srun's TERM left.
    """
    more = ("--notify", "cat >> told")
    run = user.submit("train.fail_phase=train", "train.fail_rank=1", nodes=2, more=more)
    run.until("FAILED")
    eventually(lambda: not user.sandbox.queue())
    assert user.sandbox.processes_of(run) == []
    error = "KeyError: 'told to fail'"
    assert run.status()["reason"] == f"{error} at train.py, line 29"
    (told,) = read_lines(run.path / "told")  # in its directory, before the job was gone
    assert (told["event"], told["nodes"], told["attempt"]) == ("failure", 2, 1)
    assert told["reason"] == f"{error} at train.py, line 29"
    assert f"{error} at train.py, line 29\n" in user.trnslurm("runs", "--path", str(user.site))
    assert [f.name for f in run.path.glob("state/train-*.json")] == ["train-1.json"]
    shown = run.shown()
    # A resume would run the same code.
    assert "\nnext: correct it there, then trnslurm submit " in shown
    assert shown.count(error) == 1 and "see: logs/train-1-node1.log" in shown
    assert error in run.logs("--node", "1")
    assert f"train attempt 1: FAILED ({error} at train.py" in run.logs("--batch")


def test_failing_precompile_never_releases_training(user) -> None:
    """Nor does it leave a job that waits for what will not come."""
    run = user.submit("precompile=always", "train.fail_phase=precompile", "train.fail_rank=0")
    run.until("FAILED")
    eventually(lambda: not user.sandbox.queue())
    reason = run.status()["reason"]
    assert "the trial run failed (exit code 1): KeyError: 'told to fail' at train.py" in reason
    assert run.phase("train")["state"] == "CANCELLED"
    assert run.facts() == {}
    assert "see: logs/precompile-1-node0.log\n" in run.shown()


def test_cancelled_while_it_saves(user) -> None:
    """A run that stops to be requeued, and is cancelled meanwhile, does not come back."""
    run = user.submit("train.wait=true")
    run.until_there(1)
    user.sandbox.slurm("scancel", "--batch", "--signal=USR1", run.jobs["train"])
    eventually(lambda: (run.path / "state/stop-train-1.json").exists())
    user.sandbox.slurm("scancel", run.jobs["train"])
    eventually(lambda: not user.sandbox.queue())
    assert run.status()["state"] == "CANCELLED"
    assert [f.name for f in run.path.glob("state/train-*.json")] == ["train-1.json"]


def test_without_requeue(user) -> None:
    """Then a training that has saved stays stopped, and one that fails has failed."""
    stopping = user.submit("train.wait=true", "train.stop=true", "slurm.requeue=false")
    failing = user.submit("train.fail_attempts=[1]", "slurm.requeue=false")
    stopping.until_there(1)
    user.sandbox.slurm("scancel", "--batch", "--signal=USR1", stopping.jobs["train"])
    failing.until("FAILED")
    stopping.until("STOPPED")
    eventually(lambda: not user.sandbox.queue())
    assert stopping.status()["reason"] == "time limit; saved step 10"
    state = json.loads((stopping.path / "state/train-1.json").read_text())
    assert state["exit_code"] == 143  # nothing that waits for its success starts
    host = failing.phase("train")["hosts"]
    assert failing.status()["reason"] == f"rank 0 on {host}: attempt 1 was told to fail"
