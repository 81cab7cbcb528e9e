"""Gradients that workers on one machine's CPUs sum in shared memory."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.train.optim.gradients import SharedGradients

from ..free_port import free_port
from .conftest import make_environment

WORKER = Path(__file__).with_name("sharing_worker.py")


def test_every_worker_has_the_sum_of_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3",
         "--master_addr=127.0.0.1", f"--master_port={free_port()}", str(WORKER)],
        cwd=tmp_path, env=make_environment("cpu", "train", tmp_path), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "world", "local_world", "fit"),
    [("cpu", 4, 4, True), ("cpu", 4, 2, False), ("cpu", 1, 1, False), ("cuda", 4, 4, False)],
)
def test_only_workers_of_one_machine_share_memory(name, world, local_world, fit):
    device = SimpleNamespace(name=name, world=world, local_world=local_world)
    assert SharedGradients.fit(device) == fit
