"""Who is slower than the others: found in invented times, and never in healthy ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.node.usage.read import notices
from trnslurm.pace import Pace, Spent, WorkerTime
from trnslurm.train.devices.plain import CudaTimer

Times = tuple[float, float]
"""How long a worker computes, and gets its data, in a step."""


class Training:
    """Workers whose steps take what a function says, and Pace, which looks at them."""

    def __init__(self, run: Path, workers: int, network_s: float = 0.05) -> None:
        self.files = RunFiles(run)
        self.files.state.mkdir(parents=True)
        self.pace, self.network_s = Pace(self.files.pace_file("train", 1)), network_s
        self.spent = [Spent()] * workers
        self.step = 0

    def run(self, looks: int, times: Callable[[int], Times], steps: int = 60) -> list[str]:
        for _ in range(looks):
            for _ in range(steps):
                each = [times(rank) for rank in range(len(self.spent))]
                whole = max(sum(pair) for pair in each) + self.network_s
                for rank, (compute, data) in enumerate(each):
                    told = {"data": data, "collectives": whole - compute - data}
                    self.spent[rank] = self.spent[rank].with_step(told, whole)
                self.step += 1
            workers = [WorkerTime(n // 2, f"c-{n // 2}", s) for n, s in enumerate(self.spent)]
            self.pace.look(self.step, workers)
        return [f"{n.host}: {n.text}" for n in notices(self.files, "train", 1)]


def healthy(_: int) -> Times:
    return random.uniform(0.2, 0.3), random.uniform(0.0, 0.02)


def test_a_slow_worker_is_named(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", 8)
    assert training.run(3, healthy) == []

    def slow(rank: int) -> Times:
        compute, data = healthy(rank)
        return compute * (1.8 if rank == 5 else 1.0), data

    assert training.run(2, slow) == []  # not yet: it may pass
    (told,) = training.run(1, slow)
    assert told.startswith("c-2: worker 5 (node 2) computes 1.") and "since step 180" in told
    found = read_json(training.files.pace_file("train", 1))
    assert [(each["what"], each["node"]) for each in found["notices"]] == [("compute", 2)]
    workers = found["workers"]
    assert workers[5][0] == 2 and workers[5][1] > 1.7 * workers[4][1]
    assert training.run(1, healthy) == []  # it has caught up


def test_slow_data_is_told_apart(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", 2)
    (told,) = training.run(5, lambda rank: (0.2, 0.15 if rank else 0.001))
    assert "worker 1 (node 0) waits for its data" in told


def test_a_slow_network_is_told_apart(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", 8)
    assert training.run(6, healthy) == []
    training.network_s = 0.5
    (told,) = training.run(4, healthy)
    assert told.startswith("all nodes: workers wait ")
    assert "as long as before in collectives since step 360: check the network with" in told


@pytest.mark.parametrize("workers", [1, 2, 32])
def test_healthy_workers_are_not_blamed(tmp_path: Path, workers: int) -> None:
    random.seed(3)
    training = Training(tmp_path / "run", workers)

    def uneven(rank: int) -> Times:
        hiccup = 3.0 if random.random() < 0.002 else 1.0  # of the operating system
        return random.uniform(0.18, 0.3) * hiccup, random.expovariate(200)

    for _ in range(35):
        assert training.run(1, uneven) == []
    assert training.step >= 2000


def test_who_holds_up_nobody_is_not_blamed(tmp_path: Path) -> None:
    """Worker 3 waits, inside of its computing, for the slow data of the others."""
    files = RunFiles(tmp_path)
    files.state.mkdir()
    pace = Pace(files.pace_file("train", 1))
    spent = [Spent(0, 0.0, 0.0, 0.0)] * 4
    for look in range(6):
        workers = [WorkerTime(0, "c-0", each) for each in spent]
        pace.look(20 * look, workers)
        for rank, each in enumerate(spent):
            compute, data = (0.5, 0.0) if rank == 3 else (0.2, 0.3)
            spent[rank] = Spent(
                each.steps + 20, each.compute + 20 * compute, each.data + 20 * data, each.wait + 1.0
            )
    assert read_json(files.pace_file("train", 1))["workers"][3] == [0, 0.5, 0.0, 0.05]
    assert [*notices(files, "train", 1)] == []


def test_few_steps_wait_for_more(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", 2)
    training.run(9, lambda rank: (0.2 + rank, 0.0), steps=3)
    assert training.spent[0].steps == 27
    assert read_json(training.files.pace_file("train", 1))["step"] > 12


def test_a_gpu_counts_its_own_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return Event.done

        def elapsed_time(self, other: Event) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = CudaTimer()
    with timer("collectives"):
        assert timer.doing == "collectives"
    assert timer.doing == "" and timer.take() == {"collectives": 0.0}
    Event.done = True
    with timer("data"):
        pass
    taken = timer.take()
    assert taken["collectives"] == 0.25 and taken["data"] >= 0
