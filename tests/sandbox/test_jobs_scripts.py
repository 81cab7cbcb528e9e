"""Scripts of one's own on a real Slurm: as they are, and with the contract's three calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trnslurm.runs.run import RunDir

from .cluster import eventually
from .jobs import Run, User

PROJECT = Path(__file__).parents[1] / "project"
RANKS = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NODEID".split()
print("ranks", *(os.environ[name] for name in names), flush=True)
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
    """At its time limit it saves first; after a crash it begins with what it has saved."""
    batch = ("--set", "batch.global_batch=16", "--set", "batch.micro_batch=2")
    given = "--batch-size {micro_batch} --accum {accumulation} --resume {resume} --steps 100000"
    given += " --out {checkpoints} --pause 0.02"
    run = submit(user, project / "told.py", "--time", "30", *batch, "--", *given.split())
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
    user.trnslurm("cancel", str(run.path))
    run.until("CANCELLED")
