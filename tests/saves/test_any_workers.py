"""What some workers saved, others load: sharded or not, on any number of them, bit for bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trnslurm
from trnslurm.contract.checkpoints import checkpoint_name
from trnslurm.saves.manifest import check_sizes
from trnslurm.saves.pieces import Files

from ..processes import run_process

WORKER = Path(__file__).with_name("worker.py")
STEPS = 7
LEGS = (("fsdp", 2), ("fsdp", 3), ("hybrid", 4), ("ddp", 2), ("tensor", 2), ("fsdp", 4))
"""How many workers of which form do a step each; the last one is done by one worker alone."""


def train(form: str, workers: int, checkpoints: Path, end: int) -> dict[str, Any]:
    """Train up to a step; return what worker 0 says."""
    command = [sys.executable, WORKER, form, str(STEPS), checkpoints, str(end)]
    if form != "plain":
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command[1:1] = torchrun
    root = str(Path(trnslurm.__file__).parents[1])
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    said = run_process(command, env=env).ok
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return dict(lines[0])


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, joined, but those that each worker has for itself."""
    files = Files(checkpoint, check_sizes(checkpoint)["files"])
    return {name: files.whole(name) for name in files.names() if not name.startswith("worker-")}


@pytest.mark.rest
def test_a_training_goes_on_in_any_form_on_any_number_of_workers(tmp_path: Path) -> None:
    never_stopped = train("plain", 1, tmp_path / "plain", STEPS)
    checkpoints = tmp_path / "saved"
    for done, (form, workers) in enumerate(LEGS):
        told = train(form, workers, checkpoints, done + 1)
        assert told["first"] == done, (form, workers)
        assert told["sharded"] > 0 or form == "ddp"
        if done:
            name = checkpoint_name(done)
            saved = tensors_of(checkpoints / name)
            again = tensors_of(tmp_path / f"saved-{done}-again" / name)
            assert saved.keys() == again.keys()
            assert len(saved) == 7 + 3 * 6
            for each, tensor in saved.items():
                assert torch.equal(tensor, again[each]), (form, workers, each)
    told = train("plain", 1, checkpoints, STEPS)
    assert told["first"] == STEPS - 1
    assert told["samples"] == never_stopped["samples"] == 8 * STEPS
    assert told["seen"] == STEPS
    for step, loss in never_stopped["losses"].items():
        assert told["losses"][step] == pytest.approx(loss, rel=1e-6), step
    assert told["best"][1] == never_stopped["best"][1]
