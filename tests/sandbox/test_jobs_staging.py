"""A job whose nodes import from copies of its environment, on a real Slurm; again when requeued."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..waiting import eventually

pytestmark = pytest.mark.rest


def test_a_job_and_its_next_attempt_run_from_copies(user) -> None:
    """The nodes and the spare share a disk here: one unpacks, and the others wait for it."""
    environment, disk = user.home / "environment", user.home / "disk"
    disk.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = environment / "bin/python"
    sets = (
        f"python={python}",
        f"stage_python={disk}",
        f"activate=[source {environment}/bin/activate]",
        "slurm.spares=1",
    )
    run = user.submit("train.wait=true", *sets, nodes=2)

    def pythons(attempt: int) -> set[str]:
        facts = run.until_there(2, attempt=attempt).values()
        found = {fact["environment"]["TRNSLURM_PYTHON"] for fact in facts}
        for fact in facts:
            (copy,) = {str(Path(python).parents[1]) for python in found}
            assert fact["environment"]["PATH"].split(":")[0] == f"{copy}/bin"
            assert fact["environment"]["VIRTUAL_ENV"] == copy
        return found

    (first,) = pythons(1)
    assert Path(first).parents[2].parent == disk
    user.sandbox.slurm("scontrol", "requeue", run.jobs["train"])
    assert pythons(2) == {first}
    said = user.trnslurm("stacks", str(run.path)).splitlines()
    assert said[0] == "2 workers: 0-1" and said[1].startswith("  code/jobs/probe/train.py:")
    run.go()
    run.until("COMPLETED")
    logs = []
    for attempt in (1, 2):
        spare = run.path / f"logs/spares-train-{attempt}.log"
        eventually(lambda file=spare: file.exists() and first in file.read_text())
        files = [spare, *sorted(run.path.glob(f"logs/train-{attempt}-node*.log"))]
        logs.append("".join(file.read_text() for file in files))
    assert [log.count("staging: unpacked to ") for log in logs] == [1, 0]
    assert all("warning" not in log for log in logs)
    (archive,) = user.run_root.glob(".trnslurm-*/*.tar")
    assert archive.stat().st_size
