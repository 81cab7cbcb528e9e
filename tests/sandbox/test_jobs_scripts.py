"""Custom scripts on a real Slurm: as they are, and with the contract's three calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trnslurm.runs.run import RunDir

from ..waiting import eventually
from .jobs import Run, User

PROJECT = Path(__file__).parents[1] / "project"
RANKS = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NODEID".split()
print("ranks", *(os.environ[name] for name in names), flush=True)
"""

# Says a step, and goes on when it is told to.
HOLD = """
import sys, time
from pathlib import Path
import trnslurm
number, place = int(sys.argv[1]), Path(sys.argv[2])
trnslurm.report(step=1, steps=1, loss=number)
while not (told := place / f"go-{number}").exists():
    time.sleep(0.05)
sys.exit(told.read_text() == "fail")
"""


@pytest.fixture
def project(user: User, tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    shutil.copytree(PROJECT, directory)
    return directory


def submit(user: User, script: Path, *words: str) -> Run:
    """Submit a script on two nodes; the sandbox's are CPUs, whatever they are named."""
    options = user.options(2, "device=cpu", "devices=[cpu]", "workers_per_node=2")
    return user._submit(str(script), *options, *words)


def test_every_worker_is_a_task_of_slurm(user: User, project: Path) -> None:
    (project / "ranks.py").write_text(RANKS)
    run = submit(user, project / "ranks.py", "--time", "10", "--launcher", "srun")
    run.until("COMPLETED")
    logs = "".join(run.logs("--node", node) for node in "01")
    found = sorted(line for line in logs.splitlines() if line.startswith("ranks "))
    assert found == ["ranks 0 0 4 2 0", "ranks 1 1 4 2 0", "ranks 2 0 4 2 1", "ranks 3 1 4 2 1"]


def test_a_program_that_is_no_python(user: User, project: Path) -> None:
    run = submit(user, project / "run.sh", "--time", "10", "--", "a b", "{workers}")
    run.until("COMPLETED")
    assert (run.path / "work/said-1.txt").read_text() == "node 1 of 2: a b 4\n"


def test_a_script_that_keeps_the_contract_is_requeued(user: User, project: Path) -> None:
    """At its time limit it saves first; after a crash or a hang it begins with what it saved."""
    hang = ("--set", "hang_minutes=0.25")
    batch = ("--set", "batch.global_batch=16", "--set", "batch.micro_batch=2")
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps 100000"
    given += " --out {checkpoints} --pause 0.02"
    run = submit(user, project / "told.py", "--time", "30", *batch, *hang, "--", *given.split())
    directory = RunDir(run.path)

    def until_step(attempt: int) -> None:
        eventually(lambda: directory.last_metrics().get("attempt") == attempt, 300)

    until_step(1)
    # What Slurm sends a while before the limit.
    user.sandbox.slurm("scancel", "--batch", "--signal=USR1", run.jobs["train"])
    until_step(2)
    first = directory.attempts("train")[0]
    saved = json.loads((run.path / "state/saved.json").read_text())
    assert first.state == "REQUEUED" and first.reason.startswith("time limit; saved step ")
    step = int(first.reason.rpartition(" ")[2])
    assert saved["step"] >= step > 0
    steps = {line["step"]: line["attempt"] for line in directory.steps()}
    assert steps[step] == 1 and steps[step + 1] == 2
    # A crash, once something newer is saved.
    eventually(lambda: directory.newest_step() > step, 300)
    user.sandbox.fault("proc", "2", "told.py", "KILL")
    until_step(3)
    second = directory.attempts("train")[1]
    assert second.state == "REQUEUED" and " was saved" in second.reason
    # A hang, whose node the next attempt leaves out.
    frozen = directory.attempts("train")[2].hosts.split(",")[1]
    user.sandbox.fault("proc", frozen.rpartition("-")[2], "told.py", "STOP")
    until_step(4)
    third, fourth = directory.attempts("train")[2:]
    assert third.state == "REQUEUED" and f"{frozen}: worker 2 (node 1, " in third.reason
    assert "its process is stopped (state T)" in third.reason
    assert frozen not in fourth.hosts.split(",")
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")


def test_runs_of_a_sweep_take_turns(user: User, tmp_path: Path) -> None:
    """A requeue is no end: the next one's turn comes when the run has ended for good."""
    (tmp_path / "project").mkdir()
    script = tmp_path / "project/hold.py"
    script.write_text(HOLD)
    options = user.options(1, "device=cpu", "devices=[cpu]", "workers_per_node=1")
    sweep = ("--sweep", "places.n=1,2,3", "--at-most", "1", "--time", "10", "--launcher", "python")
    said = user.trnslurm(
        "submit", str(script), *options, *sweep, "--json", "--", "{n}", str(tmp_path)
    )
    found = json.loads(said)
    first, second, third = (Run(user, Path(run["directory"]), run["jobs"]) for run in found)
    directory = RunDir(first.path)
    eventually(lambda: directory.last_metrics().get("attempt") == 1, 300)
    assert second.phase("train")["reason"] == f"waiting for the end of {first.path.name}"
    user.sandbox.slurm("scontrol", "requeue", first.jobs["train"])
    eventually(lambda: directory.last_metrics().get("attempt") == 2, 300)
    assert (second.state, third.state) == ("PENDING", "PENDING")
    # One that fails makes room as well.
    (tmp_path / "go-1").write_text("fail")
    second.until("RUNNING")
    assert first.state == "FAILED" and third.state == "PENDING"
    user.trnslurm("cancel", str(third.path))
    (tmp_path / "go-2").write_text("")
    second.until("COMPLETED")
    stands = json.loads(user.trnslurm("status", found[0]["sweep"], "--json"))
    assert [run["state"] for run in stands["runs"]] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert stands["best"] == first.path.name and stands["next"].startswith("trnslurm resume")
