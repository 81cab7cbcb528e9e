"""Who is slower than the others in a custom script: by what DistributedDataParallel times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import trnslurm
from trnslurm import calls, ddp_pace
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.ddp_pace import DdpPace
from trnslurm.node.usage.read import notices

from ..waiting import eventually
from .conftest import run_workers

pytestmark = pytest.mark.rest

WORKER = Path(__file__).with_name("ddp_worker.py")


@contextmanager
def training(run: RunFiles, workers: int, **options: Any) -> Iterator[None]:
    """Train until the block ends, which is then a stop that the script follows."""
    run.state.mkdir()
    run.checkpoints.mkdir()
    done: list[Any] = []

    def train() -> None:
        words = json.dumps(options)
        more = {"TRNSLURM_CHECKPOINTS": str(run.checkpoints), "ACCELERATE_USE_CPU": "true"}
        done.append(run_workers(workers, WORKER, words, cwd=run.path, **more))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        write_json(run.stop_file("train", 1), {})
        thread.join()
    assert done[0].returncode == 0 and "ended as asked" in done[0].stdout, done[0].stdout


def told(run: RunFiles) -> list[str]:
    return [notice.text for notice in notices(run, "train", 1)]


def looks(run: RunFiles, number: int) -> dict[str, Any]:
    """Wait for so many looks of worker 0; return what it wrote in the last."""
    seen = {0}
    while len(seen) <= number:
        facts = eventually(lambda: found if (found := newest(run))["step"] > max(seen) else None)
        seen.add(facts["step"])
    return facts


def newest(run: RunFiles) -> dict[str, Any]:
    return {"step": 0} | read_json(run.pace_file("train", 1))


@pytest.mark.parametrize(
    ("slow", "loop", "workers", "says"),
    [
        ("computing", "own", 3, "worker 1 (node 0) computes "),
        ("data", "own", 3, "worker 1 (node 0) waits for its data "),
        ("data", "trainer", 2, "worker 1 (node 0) waits for its data "),
        ("computing", "trainer", 2, "worker 1 (node 0) computes "),
        ("data", "lightning", 2, "worker 1 (node 0) waits for its data "),
        ("computing", "lightning", 2, "worker 1 (node 0) computes "),
    ],
)
def test_a_slow_worker_is_named(
    tmp_path: Path, slow: str, loop: str, workers: int, says: str
) -> None:
    run = RunFiles(tmp_path)
    with training(run, workers, slow=slow, loop=loop):
        (text,) = eventually(lambda: told(run))
    assert text.startswith(says) and " since step " in text


@pytest.mark.parametrize("slow", ["data", "saving"])
def test_who_only_waits_inside_of_the_model_is_not_blamed(tmp_path: Path, slow: str) -> None:
    """There the other worker's computing takes long, but nobody waits for it."""
    run = RunFiles(tmp_path)
    with training(run, 2, slow=slow, meets=True):
        facts = looks(run, 6)
    first, second = facts["workers"]
    assert first[1] > 2 * second[1], "worker 0 computes longest, as it waits there"
    assert [text for text in told(run) if "worker 0" in text] == []
    assert bool(told(run)) == (slow == "data")


def test_healthy_workers_are_not_blamed(tmp_path: Path) -> None:
    """In many short steps, on processors that others use too."""
    run = RunFiles(tmp_path)
    with training(run, 2, pause_s=0.002, least=100):
        for number in range(1, 9):
            looks(run, number)
            assert told(run) == []
    assert newest(run)["step"] > 800


class Model:
    """A stand-in for DistributedDataParallel."""

    training = True

    def __init__(self, seconds: float = 0.1) -> None:
        self.iteration, self.seconds = 0, seconds

    def _get_ddp_logging_data(self) -> dict[str, int]:
        self.iteration += 10
        names = ("compute", "comm", "compute_comm_overlap")
        times = {f"backward_{name}_time": int(self.seconds * 1e9) for name in names}
        return times | {"iteration": self.iteration, "forward_compute_time": int(5e8)}


class Store(dict[str, str]):
    """A stand-in for a process group's store, which fails at what `fails` says."""

    fails = ""
    failed = threading.Event()

    def _try(self, name: str) -> None:
        if self.fails == name:
            self.failed.set()
            raise RuntimeError("Broken pipe")

    def clone(self) -> Store:
        self._try("clone")
        return self

    def set(self, key: str, value: str) -> None:
        self._try("set")
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        self._try("check")
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[str]:
        self._try("multi_get")
        return [self[key] for key in keys]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is PyTorch's; nothing waits."""
    ours = SimpleNamespace(DistributedDataParallel=Model)
    monkeypatch.setitem(ddp_pace.sys.modules, "torch.nn.parallel.distributed", ours)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    for name in ("_BEGIN_S", "_READ_S", "LOOK_S"):
        monkeypatch.setattr(ddp_pace, name, 0.0)
    yield
    for thread in threading.enumerate():
        if thread.name == "pace":
            thread.join(600)


def test_what_is_told_adds_up(made: None, tmp_path: Path) -> None:
    model, store = Model(), Store()
    pace = DdpPace(tmp_path / "pace.json", 0, 1, store)
    batches = iter(DataLoader(range(99)))  # type: ignore[arg-type]
    pace.step_done()
    for _ in range(3):
        pace.step_done()
    assert pace._spent[:2] == (2, pytest.approx(1.2)) and pace._spent.wait == 0
    before = pace._data_s
    next(batches)
    trained = pace._data_s
    assert trained > before
    with torch.no_grad():
        next(batches)
    other = threading.Thread(target=lambda: next(batches))
    other.start()
    other.join()
    model.training = False
    next(batches)
    assert pace._data_s == trained, "an evaluation, or a thread that fetches ahead"
    model.seconds = 0.0  # it ran without a backward pass
    pace.step_done()
    assert pace._spent.steps == 2
    eventually(lambda: json.loads(store.get("trnslurm/pace/0", "[]"))[2:3] == [2])
    pace._closed.set()


@pytest.mark.parametrize("fails", ["clone", "set", "check", "multi_get"])
def test_a_store_that_fails_does_no_harm(made: None, tmp_path: Path, fails: str) -> None:
    model, store = Model(), Store()
    store.fails, store.failed = fails, threading.Event()
    pace = DdpPace(tmp_path / "pace.json", 0, 1, store)
    for step in range(1, 6):
        pace.step_done(step)
    assert store.failed.wait(600) and model
    assert not (tmp_path / "pace.json").exists()


def test_a_script_that_tells_nothing_is_not_harmed(
    made: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without DistributedDataParallel, with two, with one that goes, or with an old PyTorch."""
    plain = _BaseDataLoaderIter.__next__

    def ends(number: int = 0) -> bool:
        models = [Model() for _ in range(number)]
        pace = DdpPace(tmp_path / "pace.json", 1, 2, Store())
        pace.step_done()
        models.clear()
        pace.step_done()
        pace.step_done()
        pace._closed.set()
        return pace._next > time.monotonic() + 1e6

    assert ends() and ends(2)
    assert _BaseDataLoaderIter.__next__ is plain
    assert ends(1)
    with monkeypatch.context() as patch:
        patch.delattr(Model, "_get_ddp_logging_data")
        assert ends(1)
    monkeypatch.delitem(ddp_pace.sys.modules, "torch.nn.parallel.distributed")
    assert ends(1)


def test_a_module_of_the_same_name_as_pythons_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RUN_DIR", str(tmp_path)), ("PHASE", "train"), ("ATTEMPT", "1")):
        monkeypatch.setenv(f"TRNSLURM_{name}", value)
    monkeypatch.setattr(calls, "_worker", None)
    monkeypatch.setattr(calls._Worker, "_follow_term", lambda worker: None)
    monkeypatch.setattr(calls, "_shared_store", Store)
    for name in ("trnslurm.ddp_pace", "trnslurm.pace"):
        monkeypatch.delitem(calls.sys.modules, name)
    monkeypatch.setitem(calls.sys.modules, "statistics", None)
    RunFiles(tmp_path).state.mkdir()
    trnslurm.report(step=1, loss=2.0)
    assert '"loss": 2.0' in RunFiles(tmp_path).metrics_file.read_text()
    assert calls._worker and calls._worker._pace is None
