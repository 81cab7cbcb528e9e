"""A script of Ray Train on trnslurm's Ray cluster: killed, and resumed from Ray's own checkpoints.

Part of `make test-ray`, as Ray is large.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from trnslurm.records.run import RunDir

from ..processes import run_process

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.ray


def test_it_continues_from_rays_checkpoint(tmp_path: Path) -> None:
    (project := tmp_path / "project").mkdir()
    shutil.copy(ROOT / "tests/local/ray_train.py", project / "train.py")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def trnslurm(*words: str) -> str:
        done = run_process([sys.executable, "-m", "trnslurm", *words], cwd=project, env=env)
        return done.out + done.err

    on_cpu = ("--set", "devices=[cpu]", "--set", "workers_per_node=1", "--launcher", "ray")
    said = trnslurm(
        "submit", "./train.py", "--cluster", "local", "--nodes", "2", *on_cpu, "--", "{checkpoints}"
    )
    assert "FAILED" in said and "ray.train.WorkerGroupError" in said, said
    assert "--force` if the script finds checkpoints/trained/" in said, said
    said = trnslurm("resume", "last", "--force")
    assert "COMPLETED" in said, said
    [path] = (tmp_path / "trnslurm-runs").iterdir()

    def losses(attempt: int) -> dict[int, str]:
        log = RunDir(path).node_log("train", attempt, 0).read_text()
        return {int(n): loss for n, loss in re.findall(r"step (\d+) loss (\S+) world 2", log)}

    first, second = losses(1), losses(2)
    assert max(first) == 4 and max(second) == 8 and min(second) > 1
    assert {step: second[step] for step in first.keys() & second} == {
        step: first[step] for step in first.keys() & second
    }
