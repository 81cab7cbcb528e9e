"""`make test-gpu` where there is no GPU: it lists what waits for one, and passes nothing off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..gpu.trainings import RECIPES

ROOT = Path(__file__).parents[2]


def make(*variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "test-gpu", f"GPU_PYTHON={sys.executable}", *variables],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""},  # none, even if there are
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_gpu_it_ends_in_one_line_and_saw_nothing(tmp_path: Path) -> None:
    done = make(f"GPU_RESULTS={tmp_path}/results")
    error, said_by_make = done.stderr.splitlines()
    assert error.startswith("error: no GPU was tested: PyTorch ")
    assert "Error 1" in said_by_make
    assert (done.returncode, done.stdout, [*tmp_path.iterdir()]) == (2, "", [])


def test_a_dry_run_lists_every_case_with_its_command() -> None:
    done = make("DRY_RUN=1")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    commands = [place for place, line in enumerate(lines) if line.startswith("make ")]
    for recipe in RECIPES:
        assert f"make test-gpu ONLY='test_trains[{recipe}]'" in lines
    assert "make bench-gpu" in lines
    assert all(lines[place + 1].startswith("    ") for place in commands)  # and what it is

    only = make("DRY_RUN=1", "ONLY=test_trains[fsdp]").stdout.splitlines()
    assert [line for line in only if line.startswith("make test-gpu")] == [
        "make test-gpu ONLY='test_trains[fsdp]'"
    ]
