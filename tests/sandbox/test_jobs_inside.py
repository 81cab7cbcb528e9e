"""Runs inside a job that their user holds: submit --in."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from ..processes import run_process
from ..waiting import eventually
from .cluster import line_of
from .jobs import Run

pytestmark = pytest.mark.rest


@pytest.fixture
def held(user) -> str:
    """A job of three whole nodes, which does nothing."""
    words = ("--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    job = user.sandbox.slurm("sbatch", *words).ok.strip()
    eventually(lambda: holds(user, job))
    return job


def holds(user, job: str) -> bool:
    """The job runs, and no step of it but its own script."""
    running = user.sandbox.slurm("squeue", "--noheader", "--format=%A %T").ok.splitlines()
    steps = user.sandbox.slurm("squeue", "--noheader", "--steps", "--format=%i").ok.split()
    return f"{job} RUNNING" in running and steps == [f"{job}.batch"]


def nodes_of(user, job: str) -> list[str]:
    """The nodes of the job: Slurm need not take the first ones."""
    listed = user.sandbox.slurm("squeue", "--noheader", "--jobs", job, "--format=%N").ok.strip()
    return user.sandbox.slurm("scontrol", "show", "hostnames", listed).ok.split()


def submitted(user, held: str, *sets: str) -> Run:
    words = user.options(2, *sets)
    said = user.trnslurm("submit", "probe", *words, "--in", held, "--detach", "--json")
    facts = json.loads(said)
    return Run(user, user.run_root / facts["run"], facts["jobs"])


def test_its_phases_run_on_the_first_nodes(user, held) -> None:
    """The log is printed; a job that is too small says what fits."""
    words = user.options(2, "precompile=always", "train.say=here we are")
    said = user.trnslurm("submit", "probe", *words, "--in", held).splitlines()
    assert "here we are" in said
    run = Run(user, user.run_root / said[0].split()[1], {})
    phases = {phase["phase"]: phase for phase in run.status()["phases"]}
    assert {phase["state"] for phase in phases.values()} == {"COMPLETED"}
    assert {phase["job_id"].partition(".")[0] for phase in phases.values()} == {held}
    hosts = ",".join(nodes_of(user, held)[:2])
    for name, phase in phases.items():
        assert phase["hosts"] == hosts
        assert {fact["environment"]["SLURM_JOB_NUM_NODES"] for fact in run.facts(name).values()}
        assert f"{name} attempt 1: COMPLETED" in run.logs("--batch", "--phase", name)
    assert holds(user, held)

    argv = [sys.executable, "-m", "trnslurm", "submit", "probe", *user.options(4), "--in", held]
    done = run_process(argv, env=user.environment, cwd=user.home)
    hold = "salloc --partition=compute --nodes=4 --exclusive"
    why = f"job {held} has 3 nodes, but the run needs 4: pass --nodes 3, or hold more nodes: {hold}"
    assert (done.code, done.err) == (1, f"error: {why}\n")


def test_ctrl_c_ends_the_run_and_not_the_job(user, held) -> None:
    """Once: a training may save. Twice: at once, even workers that ignore TERM."""
    words = user.options(2, "train.wait=true", "train.deaf=true", "train.say=here we are")
    argv = [sys.executable, "-m", "trnslurm", "submit", "probe", *words, "--in", held]
    with user.sandbox.running(argv, {"HOME": str(user.home)}) as process:
        run = Run(user, user.run_root / line_of(process).split()[1], {})
        while line_of(process).strip() != "here we are":
            pass
        assert run.status()["reason"] == f"in job {held}"
        run.until_there(2)
        process.send_signal(signal.SIGINT)
        eventually(lambda: (run.path / "state/stop-train-1.json").exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 130, process.stderr.read()
    assert run.state == "CANCELLED"
    assert user.sandbox.processes_of(run) == []
    eventually(lambda: holds(user, held))


def test_a_crash_starts_again_inside_and_a_resume_outside(user, held) -> None:
    run = submitted(user, held, "train.fail_attempts=[1]", "train.wait=true", "train.stop=true")
    run.until_there(2)
    run.go(1)
    run.until_there(2, attempt=2)
    assert [a["state"] for a in run.status()["attempts"]] == ["RESTARTED", "RUNNING"]
    shell = [sys.executable, "-m", "trnslurm", "exec", str(run.path), "--node", "1"]
    ask = "echo $(uname -n) $PWD $SLURM_NODEID $TRNSLURM_ATTEMPT $RANK"
    said = user.sandbox.run(shell, feed=ask, environ={"HOME": str(user.home)}).ok
    assert said.split() == [nodes_of(user, held)[1], str(run.path), "1", "2"]

    assert "saving a checkpoint first" in user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")
    assert run.status()["reason"] == "by trnslurm cancel; saved step 20"
    eventually(lambda: holds(user, held))

    user.sandbox.slurm("scancel", held)  # its nodes are needed
    user.trnslurm("resume", str(run.path))
    run.until_there(2, attempt=3)
    assert run.status()["phases"][0]["job_id"].isdigit()
    run.go()
    run.until("COMPLETED")


def test_the_end_of_the_job_ends_the_run(user, held) -> None:
    run = submitted(user, held, "train.wait=true")
    run.until_there(2)
    user.sandbox.slurm("scancel", held)
    run.until("CANCELLED")
    eventually(lambda: not user.sandbox.queue())
    ended = f"something other than trnslurm cancel ended its step or job {held}"
    assert run.status()["reason"].startswith(ended)
    assert user.sandbox.processes_of(run) == []
