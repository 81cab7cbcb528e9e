"""What workers measure for `doctor --run`: two of them for real, one of which rounds otherwise."""

import json
from pathlib import Path

import pytest
import torch

from trnslurm.devices import XLA_CPU
from trnslurm.health.found import Found
from trnslurm.health.judge import Expected, judge
from trnslurm.train import checkup
from trnslurm.train.environment import read_environment

from .conftest import make_environment, run_workers

pytestmark = pytest.mark.rest

WORKER = Path(__file__).with_name("checkup_worker.py")


def test_a_worker_that_rounds_otherwise_is_found_on_xla(tmp_path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"device": "xla-cpu"}))
    done = run_workers(2, WORKER, "plan.json", cwd=tmp_path, device="xla-cpu")
    assert done.returncode == 0, done.stdout
    files = [tmp_path / f"state/checkup-rank{rank}.json" for rank in range(2)]
    workers = {rank: json.loads(file.read_text()) for rank, file in enumerate(files)}
    assert all(w["doing"] == w["error"] == "" for w in workers.values())
    assert all(len(w["took_s"]) == 3 and w["bytes"] == 8_000_000 for w in workers.values())

    assert [w["to_nearest"] for w in workers.values()] == [True, False]

    expected = Expected(
        instance="local", device=XLA_CPU, nodes=1, workers_per_node=2, efa=0, network_gbps=0,
        compile_cache=None,
    )  # fmt: skip
    said = {line.check: line for line in judge(expected, Found(workers=workers))}
    assert said["world size"].level == said["all-reduce"].level == said["bandwidth"].level == "ok"
    assert said["rounding"].level == "problem"
    assert said["rounding"].measured.startswith("1 of 2 workers round to different bits")


def test_every_bit_counts() -> None:
    values = torch.arange(1.0, 9.0, dtype=torch.bfloat16)
    other = values.clone()
    other.view(torch.int16)[3] ^= 1
    assert checkup.checksum(values) == checkup.checksum(values.clone())
    assert checkup.checksum(values) != checkup.checksum(other)


def test_what_nccl_says_of_its_network(tmp_path) -> None:
    log = tmp_path / "nccl.log"
    head = "ip-10-0-0-1:7:9 [0] NCCL INFO "
    lines = ["NET/OFI Selected provider is efa, fabric is efa (found 4 nics)", "Using network X"]
    log.write_text("".join(f"{head}{line}\n" for line in [*lines, *lines, "Channel 00 : 0 -> 1"]))
    assert checkup.network_lines(log) == lines


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker that has not begun."""
    (tmp_path / "state").mkdir()
    for name, value in make_environment("cpu", "train", tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    environment = read_environment()
    file = environment.files.checkup_file("rank", 0)
    return checkup.CheckupWorker(environment, "cpu"), lambda: json.loads(file.read_text())


def test_a_worker_that_fails_has_said_in_what(worker) -> None:
    worker, seen = worker

    with pytest.raises(OSError, match="no route"), worker.doing("joining the other workers"):
        assert seen()["doing"] == "joining the other workers"
        raise OSError("no route")
    assert (seen()["doing"], seen()["error"]) == ("joining the other workers", "OSError: no route")


def test_a_worker_that_hangs_ends_at_the_deadline(worker, monkeypatch) -> None:
    worker, seen = worker
    ended: list[int] = []
    monkeypatch.setattr(checkup.os, "_exit", ended.append)
    monkeypatch.setattr(worker, "_deadline", 0.0)
    worker.seen["doing"] = "all-reduce of ones"
    worker.watch().join(600)
    assert ended == [1]
    assert (seen()["doing"], seen()["error"]) == (
        "all-reduce of ones",
        "did not finish within 180 s",
    )
