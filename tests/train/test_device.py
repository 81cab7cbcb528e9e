"""What a device needs before anything of it is imported."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trnslurm.train.device import open_device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

WORKER = Environment(
    rank=3, world=8, local_rank=3, local_world=8, phase="train", attempt=1, run_dir=Path(),
    device="xla-cuda",
)  # fmt: skip


def test_torch_xla_is_told_its_device_and_a_cache_of_the_workers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str | None, ...]] = []

    def opened(name: str, environment: Environment) -> str:
        seen.append(tuple(map(os.environ.get, ("PJRT_DEVICE", "XLA_PERSISTENT_CACHE_PATH"))))
        return name

    monkeypatch.setitem(sys.modules, "trnslurm.train.xla", SimpleNamespace(XlaDevice=opened))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    for name in ("xla-cuda", "neuron"):
        monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "/run/compiled")
        assert open_device(name, replace(WORKER, device=name)) == name
    assert seen == [("CUDA", "/run/compiled/3"), ("NEURON", "/run/compiled")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tpu", "plan.json: device 'tpu' is not one of cpu, cuda, neuron, xla-cpu, xla-cuda"),
        ("cuda", "plan.json: device cuda, but TRNSLURM_DEVICE is xla-cuda"),
    ],
)
def test_refused(name: str, words: str) -> None:
    with pytest.raises(TrainError) as error:
        open_device(name, WORKER)
    assert str(error.value) == words
