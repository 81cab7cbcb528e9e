"""`make test-gpu` where there is no GPU: it lists what waits for one, and passes nothing off."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..gpu.trainings import RECIPES
from ..processes import Done, run_process

ROOT = Path(__file__).parents[2]


def make(*variables: str) -> Done:
    words = ["make", "--no-print-directory", "test-gpu", f"GPU_PYTHON={sys.executable}", *variables]
    none = {"CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""}  # even if there are GPUs
    return run_process(words, cwd=ROOT, env=os.environ | none)


def test_without_a_gpu_it_ends_in_one_line_and_saw_nothing(tmp_path: Path) -> None:
    done = make(f"GPU_RESULTS={tmp_path}/results")
    error, said_by_make = done.err.splitlines()
    assert error.startswith("error: no GPU was tested: PyTorch ")
    assert "Error 1" in said_by_make
    assert (done.code, done.out, [*tmp_path.iterdir()]) == (2, "", [])


def test_a_dry_run_lists_every_case_with_its_command() -> None:
    done = make("DRY_RUN=1")
    assert done.code == 0, done
    lines = done.out.splitlines()
    commands = [place for place, line in enumerate(lines) if line.startswith("make ")]
    for recipe in RECIPES:
        assert f"make test-gpu ONLY='test_trains[{recipe}]'" in lines
    assert "make bench-gpu" in lines
    assert all(lines[place + 1].startswith("    ") for place in commands)  # and what it is

    only = make("DRY_RUN=1", "ONLY=test_trains[fsdp]").out.splitlines()
    assert [line for line in only if line.startswith("make test-gpu")] == [
        "make test-gpu ONLY='test_trains[fsdp]'"
    ]
