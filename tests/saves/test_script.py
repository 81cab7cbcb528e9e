"""trnslurm.save and trnslurm.load, in one process."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import trnslurm
from trnslurm.contract.rundir import RunFiles
from trnslurm.saves import script
from trnslurm.saves.memory import HostCopy

from ..processes import run_process


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test as in a process of its own."""
    script._savers.clear()
    yield
    script._savers.clear()


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def steps(state: dict[str, Any], first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = state["model"](x).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()
        losses.append(loss.item())
    return losses


def again() -> None:
    """Wait for the saves, and begin as another process would."""
    for saver in script._savers.values():
        saver.settle(strict=True)
    script._savers.clear()


def test_a_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = steps(training(), 1, 9)
    state = training()
    assert trnslurm.load(state, directory=tmp_path) == 0
    found = steps(state, 1, 4)
    trnslurm.save(4, state, directory=tmp_path)
    steps(state, 5, 6)  # the copy is not disturbed by what follows
    again()
    state = training(seed=1)
    assert trnslurm.load(state, directory=tmp_path) == 4
    assert found + steps(state, 5, 9) == whole


def test_values_of_all_kinds_come_back_as_they_were(tmp_path: Path) -> None:
    kept = {
        "texts": ["a", "é\n", ""], "numbers": (1, -2.5, 1e300, True, None),
        "deep": [{"a": ((), {})}],
        "keys": {3: "c", (1, 2): "d", "$": 1}, "bytes": b"\0\xff", "tensor": torch.arange(3) > 1,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16), "empty": torch.empty(0, 3),
        "random": random.Random(1).getstate(), "numpy": np.random.RandomState(1).get_state(),
        "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2], "one": np.float32(0.1),
    }  # fmt: skip
    trnslurm.save(3, {"kept": kept}, each_worker={"seed": 5}, directory=tmp_path, wait=True)
    state: dict[str, Any] = {"kept": {"old": 1}}
    own: dict[str, Any] = {}
    again()
    assert trnslurm.load(state, each_worker=own, directory=tmp_path) == 3
    assert own == {"seed": 5}
    found = state["kept"]
    assert found.keys() == kept.keys()
    random.Random().setstate(found["random"])
    np.random.RandomState().set_state(found["numpy"])
    for name in ("texts", "numbers", "deep", "keys", "bytes", "random"):
        assert found[name] == kept[name], name
        assert type(found[name]) is type(kept[name]), name
    for name in ("tensor", "scalar", "empty"):
        assert torch.equal(found[name], kept[name]), name
        assert found[name].dtype == kept[name].dtype
    assert found["array"].tolist() == [[0, 2], [3, 5]]
    assert found["array"].dtype == np.dtype(">i2")
    assert (found["one"], type(found["one"])) == (np.float32(0.1), np.float32)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": {"b": [1, {2}]}}, "trnslurm.save: a.b.1 is a set: only tensors"),
        (
            {"a": torch.zeros(2, dtype=torch.complex64)},
            "trnslurm.save: a has dtype torch.complex64",
        ),
        ({"a": np.array([object()])}, "trnslurm.save: a is a ndarray: only tensors"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: dict[str, Any], what: str) -> None:
    with pytest.raises(TypeError, match=re.escape(what)):
        trnslurm.save(1, state, directory=tmp_path)
    assert not list(tmp_path.glob("step-*"))


def test_another_model_is_refused_and_says_how_it_differs(tmp_path: Path) -> None:
    state = training()
    trnslurm.save(1, state, directory=tmp_path, wait=True)
    state["model"][2] = nn.Linear(3, 5)
    state["model"].append(nn.Linear(5, 1, bias=False))
    with pytest.raises(ValueError, match=r"another training run: model\.3\.weight is missing: use"):
        trnslurm.load(state, directory=tmp_path)
    del state["model"][3]
    with pytest.raises(ValueError, match=r"model\.2\.weight has shape \[2, 3\] instead of"):
        trnslurm.load(state, directory=tmp_path)
    with pytest.raises(ValueError, match="it contains no teacher, only model, optimizer, schedule"):
        trnslurm.load({"teacher": nn.Linear(1, 1)}, directory=tmp_path)
    assert trnslurm.load({"model": training()["model"]}, directory=tmp_path) == 1


def test_a_damaged_one_is_passed_over(tmp_path: Path, capfd) -> None:
    state = training()
    for step in (1, 2):
        trnslurm.save(step, state, directory=tmp_path, wait=True)
    file = tmp_path / "step-00000002/rank-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again()
    assert trnslurm.load(state, directory=tmp_path) == 1
    assert "step-00000002 is damaged (rank-00000-of-00001.safetensors: its sha256" in (
        capfd.readouterr().out
    )
    file.with_name("manifest.json").unlink()  # one that this function did not write
    with pytest.raises(
        RuntimeError, match=r"was not written by trnslurm\.save: use another directory"
    ):
        trnslurm.load(state, directory=tmp_path)


def test_in_a_run_it_is_reported_and_a_newer_attempt_stops_it(tmp_path: Path, monkeypatch) -> None:
    run = RunFiles(tmp_path)
    for made in (run.state, tmp_path / "checkpoints/step-00000001.tmp-1"):
        made.mkdir(parents=True)
    for name, value in (("RUN_DIR", tmp_path), ("ATTEMPT", 2), ("PHASE", "train"),
                        ("CHECKPOINTS", tmp_path / "checkpoints")):  # fmt: skip
        monkeypatch.setenv(f"TRNSLURM_{name}", str(value))
    monkeypatch.setattr("trnslurm.calls._worker", None)
    state = training()
    assert trnslurm.load(state) == 0
    for step in (1, 2, 3):
        trnslurm.save(step, state, keep=1, wait=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert f'"path": "{tmp_path}/checkpoints/step-00000003"' in run.saved_file.read_text()
    run.state_file("train", 3).write_text("{}")
    with pytest.raises(RuntimeError, match=r"a newer attempt \(3\) of this run has begun"):
        trnslurm.save(4, state, wait=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_directories_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    for step in (2, 3, 4):
        trnslurm.save(step, training(), directory=tmp_path, keep=1, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


def test_a_last_save_that_fails_ends_the_script_with_an_error(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.touch()
    program = "import sys, trnslurm\ntrnslurm.save(1, {'a': 1}, directory=sys.argv[1])"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(trnslurm.__file__).parents[1])}
    done = run_process([sys.executable, "-c", program, place / "below"], env=env)
    assert (done.code, done.err.splitlines()[-1]) == (
        1, f"error: no checkpoint of step 1: Not a directory: '{place}/below'",
    )  # fmt: skip


def test_a_save_that_fails_is_told_and_leaves_the_one_before(tmp_path, monkeypatch, capfd) -> None:
    state = training()
    trnslurm.save(1, state, directory=tmp_path, wait=True)

    def fail(memory: HostCopy, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(HostCopy, "write", fail)
    trnslurm.save(2, state, directory=tmp_path)
    with pytest.raises(RuntimeError, match="no checkpoint of step 3: No space left on device"):
        trnslurm.save(3, state, directory=tmp_path, wait=True)
    assert "warning: no checkpoint of step 2: No space left on device" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_reader_reads_the_files(tmp_path: Path) -> None:
    state = training()
    steps(state, 1, 2)
    trnslurm.save(2, state, directory=tmp_path, wait=True)
    model = training(seed=1)["model"]
    load({"model": (found := model.state_dict())}, planner=DefaultLoadPlanner(),
         storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-00000002")))  # fmt: skip
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_an_optimizer_without_state_keeps_its_settings(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.025
    trnslurm.save(1, {"model": model, "optimizer": optimizer}, directory=tmp_path, wait=True)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    trnslurm.load({"model": model, "optimizer": fresh}, directory=tmp_path)
    assert fresh.param_groups[0]["lr"] == 0.025
