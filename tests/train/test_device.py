"""What a device needs before anything of it is imported."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trnslurm.devices import DEVICES, DeviceType
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

from ..free_port import free_port
from ..processes import Done, run_process

WORKER = Environment(
    rank=3, world=8, local_rank=3, local_world=8, phase="train", attempt=1, run_dir=Path(),
    device="xla-cuda",
)  # fmt: skip


def test_torch_xla_is_told_its_device_and_a_cache_of_the_workers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str | None, ...]] = []

    def opened(kind: DeviceType, environment: Environment) -> DeviceType:
        seen.append(tuple(map(os.environ.get, ("PJRT_DEVICE", "XLA_PERSISTENT_CACHE_PATH"))))
        return kind

    monkeypatch.setitem(
        sys.modules, "trnslurm.train.devices.xla", SimpleNamespace(XlaDevice=opened)
    )
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    for name in ("xla-cuda", "neuron"):
        monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "/run/compiled")
        assert open_device(name, replace(WORKER, device=name)) is DEVICES[name]
    assert seen == [("CUDA", "/run/compiled/3"), ("NEURON", "/run/compiled")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tpu",
            "plan.json: device 'tpu' is not one of neuron, torchneuron, xla-cpu, cpu, cuda, "
            "xla-cuda",
        ),
        ("cuda", "plan.json: device cuda, but TRNSLURM_DEVICE is xla-cuda"),
    ],
)
def test_refused(name: str, words: str) -> None:
    with pytest.raises(TrainError) as error:
        open_device(name, WORKER)
    assert str(error.value) == words


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A PyTorch that says it has two GPUs and NCCL; what it is asked for, in order."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: asked.append(("set", index)))
    monkeypatch.setattr(dist, "init_process_group", lambda *args: asked.append(args))
    monkeypatch.setattr(dist, "barrier", lambda device_ids: asked.append(("barrier", device_ids)))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    return asked


def test_a_worker_has_its_gpu_before_it_meets_the_others(two_gpus: list[object]) -> None:
    """Left to itself NCCL's barrier may take the rank's: of two GPUs 5 would be number 1."""
    place = replace(WORKER, device="cuda", rank=5, local_rank=0, local_world=1)
    device = open_device("cuda", place)
    assert (device.rank, device.world, device.torch_device) == (5, 8, torch.device("cuda", 0))
    device.barrier("here")
    assert two_gpus == [("set", 0), ("nccl",), ("barrier", [0])]


def test_more_workers_than_gpus_are_refused_before_they_meet(two_gpus: list[object]) -> None:
    with pytest.raises(TrainError, match="8 workers per node, but PyTorch finds 2 CUDA devices"):
        open_device("cuda", replace(WORKER, device="cuda"))
    assert two_gpus == []


def as_a_worker(program: str, run: Path, **own: str) -> Done:
    """Run a program with what torchrun tells the only worker."""
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                "TRNSLURM_RUN_DIR": str(run)}  # fmt: skip
    return run_process([sys.executable, "-c", program], env={**os.environ, **torchrun, **own})


STARTED = """\
from trnslurm.train.devices.open import open_device
from trnslurm.train.environment import read_environment
from trnslurm.train.loop.job import run_job
run_job(lambda: open_device("xla-cuda", read_environment()))
"""


@pytest.mark.rest
def test_a_torch_xla_without_gpus_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    done = as_a_worker(STARTED, tmp_path)
    assert done.code == 1
    assert "does not support GPUs, like every PyTorch/XLA since 2.8" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


# Neuron's branch, with torch_xla's CPU under it: one process there is a whole world.
AS_ON_NEURON = """\
import json
import torch_xla
import torch_xla.core.xla_model as xm
from torch import zeros
from trnslurm.devices import NEURON
from trnslurm.train.devices.xla import XlaDevice
from trnslurm.train.environment import read_environment
from trnslurm.train.optim.xla import XlaDataParallel
device = XlaDevice(NEURON, read_environment())
buckets = []
xm.all_reduce = lambda op, tensors, **options: buckets.append([op, len(tensors), options["scale"]])
optimizer = XlaDataParallel.__new__(XlaDataParallel)
optimizer._gradients = [zeros(2**18) for _ in range(5)]  # 1 MB each
optimizer._reduce()
replicas = torch_xla._XLAC._xla_get_replication_devices_count()
print(json.dumps([device.rank, device.world, replicas, buckets]))
"""


def test_workers_on_neuron_replicate_each_other_and_sum_gradients_in_buckets(
    tmp_path: Path,
) -> None:
    own = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1", "PJRT_DEVICE": "CPU"}
    own["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = "2"
    done = as_a_worker(AS_ON_NEURON, tmp_path, **own)
    assert done.code == 0, done.err
    rank, world, replicas, buckets = json.loads(done.out.splitlines()[-1])
    # Where torch_xla has no replicas its world is this one worker, however many there are.
    assert (rank, world, replicas) == (0, 1, 1)
    assert buckets == [["sum", 2, 1.0], ["sum", 2, 1.0], ["sum", 1, 1.0]]


ENDED = """\
import atexit, os, pathlib, sys, threading
from trnslurm.train.loop.job import run_job

class Kept:
    def __del__(self, write=os.write):
        write(1, b"torn down")

def stay(named):
    pathlib.Path("/proc/thread-self/comm").write_text(sys.argv[1])
    named.set()
    threading.Event().wait()

def work():
    threading.main_thread().join()
    os.write(1, b"worked, ")

def main():
    named = threading.Event()
    threading.Thread(target=stay, args=(named,), daemon=True).start()
    named.wait()
    threading.Thread(target=work).start()
    atexit.register(print, "left", end=" ")

sys.kept = Kept()
run_job(main)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("thread", "said"), [("pt_gloo_runloop", "worked, left "), ("other", "worked, left torn down")]
)
def test_python_is_not_torn_down_beside_gloo(thread: str, said: str) -> None:
    """Its threads would abort the process; what Python does before that is done."""
    done = run_process([sys.executable, "-c", ENDED, thread])
    assert (done.code, done.out) == (0, said), done.err
