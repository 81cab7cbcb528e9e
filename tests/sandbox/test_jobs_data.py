"""Data prepared as a job on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import Run

pytestmark = pytest.mark.rest


def prepare(user, *more: str) -> tuple[str, Run]:
    """Prepare the text that comes with gpt2_zero1 as a job, to its end; give what was printed."""
    words = ["--cluster", user.sandbox.cluster, "--preset", "small"]
    for setting in (f"run_root={user.run_root}", f"data_root={user.home / 'it is data'}"):
        words += ["--set", setting]
    said = user.trnslurm("data", "prepare", "gpt2_zero1", *words, "--submit", "-f", *more)
    first = said.splitlines()[0].split()
    assert first[0] == "Submitted" and first[2] == "prepare"
    return said, Run(user, user.run_root / first[1], {"prepare": first[3]})


def test_a_job_prepares_what_training_reads(user) -> None:
    said, run = prepare(user)
    data: Path = user.home / "it is data/gpt2-small"
    assert f"{run.path.name}: COMPLETED" in said
    verify = ("data", "verify", data, "--cluster", user.sandbox.cluster)
    assert user.trnslurm(*verify) == f"{data}: complete, matches its index\n"
    phase = run.phase("prepare")
    assert phase["state"] == "COMPLETED"
    assert phase["hosts"] in [user.sandbox.node_name(n) for n in user.sandbox.nodes()]
    assert f"Prepared {data}: train " in run.logs("-n", "1")
    assert "prepare attempt 1: COMPLETED" in run.logs("--batch")

    before = {file: file.stat().st_mtime_ns for file in data.iterdir()}
    _, again = prepare(user, "--set", "slurm.data_cpus=1")
    assert "already prepared from this input; there is nothing to do" in again.logs("-n", "1")
    assert {file: file.stat().st_mtime_ns for file in data.iterdir()} == before
