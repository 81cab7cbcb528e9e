"""Gradients that workers on one machine's CPUs sum in shared memory."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.devices import device_named
from trnslurm.train.optim.gradients import SharedGradients

from .conftest import run_workers

WORKER = Path(__file__).with_name("sharing_worker.py")


def test_every_worker_has_the_sum_of_all(tmp_path):
    done = run_workers(3, WORKER, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "world", "local_world", "fit"),
    [("cpu", 4, 4, True), ("cpu", 4, 2, False), ("cpu", 1, 1, False), ("cuda", 4, 4, False)],
)
def test_only_workers_of_one_machine_share_memory(name, world, local_world, fit):
    device = SimpleNamespace(kind=device_named(name), world=world, local_world=local_world)
    assert SharedGradients.fit(device) == fit
