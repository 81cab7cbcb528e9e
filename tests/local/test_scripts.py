"""Custom scripts on two emulated nodes, started for real; the launcher starts their workers."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..processes import run_process

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
BATCH = ("--set", "batch.global_batch=8", "--set", "batch.micro_batch=2")
GIVEN = ("--batch-size", "{micro_batch}", "--accum", "{accumulation}", "--out", "{checkpoints}")
UNTOLD = """
import sys, torch
import torch.distributed as dist
if sys.argv[1] == "together":
    dist.init_process_group("gloo")
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()
if sys.argv[1] == "lightning":
    sys.modules["lightning.pytorch"] = sys  # as if imported
"""
LONELY = """
import torch, trnslurm
print("alone", flush=True)
trnslurm.report(step=1, loss=torch.ones(()))
"""


class Project:
    """A copy of tests/project, in which the user stands, and the user's runs."""

    def __init__(self, home: Path) -> None:
        self.home, self.directory = home, home / "my project"
        shutil.copytree(ROOT / "tests/project", self.directory)

    def trnslurm(self, *words: str, code: int = 0) -> str:
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        done = run_process(
            [sys.executable, "-m", "trnslurm", *words], env=environment, cwd=self.directory
        )
        assert done.code == code, done.out + done.err
        return done.out

    def submit(self, *words: str, code: int = 0) -> str:
        return self.trnslurm("submit", *words[:1], "--nodes", "2", *words[1:], code=code)

    @property
    def run(self) -> Path:
        """The newest run."""
        return sorted((self.home / "trnslurm-runs").iterdir())[-1]

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.trnslurm("status", "last", "--json")))

    def losses(self) -> dict[int, float]:
        """By step, as metrics has them."""
        lines = json.loads(self.trnslurm("metrics", "last", "--json"))
        return {line["step"]: line["loss"] for line in lines}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.first
def test_a_script_runs_as_it_is(project: Project) -> None:
    """With its package and its relative paths; what it writes stays with the run."""
    before = sorted(project.directory.rglob("*"))
    project.submit("./train.py", *BATCH, "--", *GIVEN)
    assert "2 workers, 2 x 2, loss " in project.trnslurm("logs", "last")
    assert (project.run / "checkpoints/last.pt").is_file()
    assert sorted(project.directory.rglob("*")) == before
    project.submit("./run.sh", "--", "two words", "{nodes}")
    said = [(project.run / f"work/said-{node}.txt").read_text() for node in (0, 1)]
    assert said == [f"node {node} of 2: two words 2\n" for node in (0, 1)]


def test_a_script_that_keeps_the_contract(project: Project) -> None:
    """It is stopped, and resumed on another node count; then as if nothing had happened."""
    told = ("./told.py", *BATCH, "--detach", "--", *GIVEN, "--resume", "{resume}")
    project.submit(*told, "--hold", "12")
    deadline = time.monotonic() + 120
    while (seen := project.status())["metrics"].get("step") != 12:
        assert seen["state"] in ("PENDING", "RUNNING") and time.monotonic() < deadline, seen
    assert seen["metrics"]["steps"] == 30
    project.trnslurm("cancel", "last")
    seen = project.status()
    assert (seen["state"], seen["reason"]) == ("CANCELLED", "by trnslurm cancel; saved step 12")
    saved = sorted(file.name for file in project.run.glob("checkpoints/*"))
    assert saved == ["step-10.pt", "step-12.pt"]
    project.trnslurm("resume", "last", "--nodes", "1")
    assert project.status()["state"] == "COMPLETED"
    disturbed = project.losses()
    assert [*disturbed] == [*range(1, 31)]
    project.submit(*told)
    project.trnslurm("watch", "last")
    for step, loss in project.losses().items():
        assert math.isclose(disturbed[step], loss, rel_tol=1e-9), step


def test_workers_that_would_each_train_alone_are_ended(project: Project) -> None:
    (project.directory / "lonely.py").write_text(LONELY)
    said = project.submit("./lonely.py", code=1)
    assert "2 workers were started, but this worker has not opened a process group" in said


def test_workers_that_worked_alone_are_told_of(project: Project) -> None:
    """The script makes no calls and has done its work: the run is COMPLETED, with a reason."""
    (project.directory / "untold.py").write_text(UNTOLD)
    alone = "its 2 workers shared no process group, so each worked alone: "
    for how, reason in (
        ("alone", f"{alone}they did not call torch.distributed.init_process_group"),
        ("lightning", f"{alone}Lightning's Trainer needs num_nodes=2, devices=1"),
        ("together", ""),
    ):
        project.submit("./untold.py", "--", how)
        seen = project.status()
        assert (seen["state"], seen["reason"]) == ("COMPLETED", reason)
