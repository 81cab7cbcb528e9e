"""What the other nodes of a job do when its first node no longer answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trnslurm.contract.states import State
from trnslurm.contract.variables import Variable
from trnslurm.node import controller, first

NAMES = {"TRNSLURM_PHASE": "train", "TRNSLURM_ATTEMPT": "2", "SLURM_NODEID": "1"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path) -> dict[str, Any]:
    """What the controller says and is asked; the node's beats reach nobody."""
    said: dict[str, Any] = {
        "answers": False, "ends": ["RUNNING"], "has": [True], "holds": False, "requeued": 0,
    }  # fmt: skip

    def next_of(what: str) -> Any:
        """The next answer; the last one stays."""
        return said[what].pop(0) if len(said[what]) > 1 else said[what][0]

    class Controller:
        def __init__(self, job_id: str, restarts: int, _retry_s: object) -> None:
            assert (job_id, restarts) == ("7", 1)
            self.holds = False

        def learn_config(self) -> None:
            self.holds = said["holds"]

        def answers(self, host: str) -> bool:
            assert host == "node-1"
            return said["answers"]

        def what_ends_job(self) -> State:
            return State(str(next_of("ends")))

        def has_node(self, host: str) -> bool:
            assert host == "node-1"
            return bool(next_of("has"))

        def requeue(self) -> str:
            said["requeued"] += 1
            return ""

    monkeypatch.setattr(first, "Controller", Controller)
    monkeypatch.setattr(first, "PERIOD_S", 0.01)
    monkeypatch.setattr(first, "patience_s", lambda _: 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    state = {"job_id": "7", "restarts": 1, "state": "RUNNING", "hosts": "node-1,node-2"}
    (tmp_path / "state/train-2.json").write_text(json.dumps(state))
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRNSLURM_ALLOCATION", "node-1,node-2,node-3")
    monkeypatch.setenv(Variable.BEATS, "127.0.0.1:9:secret")
    return said


def state(tmp_path) -> dict[str, Any]:
    return json.loads((tmp_path / "state/train-2.json").read_text())


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"answers": True, "has": [True, False]},  # the node has rebooted
        {"holds": True, "has": [True, True, False]},  # an older Slurm has given it up
    ],
)
def test_the_job_is_requeued_without_its_first_node(asked, tmp_path, known: dict) -> None:
    asked |= known
    assert first.main() == 0
    assert asked["requeued"] == 1
    now = state(tmp_path)
    assert (now["state"], now["cause"]) == ("REQUEUED", "requeued")
    assert now["reason"] == "node-1, the job's first node, failed"
    assert now["hosts"] == "node-1,node-2"


@pytest.mark.parametrize(
    "known",
    [
        {"ends": ["CANCELLED"]},
        {"ends": ["REQUEUED"]},
        {"answers": True, "ends": ["RUNNING", "RUNNING", "CANCELLED"]},  # Slurm ends the job
        {"holds": True, "ends": ["RUNNING", "RUNNING", "CANCELLED"]},
    ],
)
def test_it_is_not(asked, tmp_path, known: dict[str, Any]) -> None:
    """The job ends anyway."""
    asked |= known
    assert first.main() == 0
    assert asked["requeued"] == 0
    assert state(tmp_path)["state"] == "RUNNING"


def test_the_nodes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [first.patience_s(node) for node in (0, 1, 2, 3, 1000)] == [36.0, 36.0, 41.0, 46.0, 96.0]
    monkeypatch.delenv(Variable.BEATS, raising=False)
    monkeypatch.setenv("SLURM_NODEID", "3")
    monkeypatch.setenv("TRNSLURM_ATTEMPT", "1")
    assert first.main() == 0  # of a job without heartbeats


def test_nodes_that_a_job_can_do_without(monkeypatch) -> None:
    """A node that is drained cannot take the place of one that is left out."""
    job = "JobId=7 Partition=gpu WorkDir=/runs/7 "
    nodes = "n1 idle\nn2 drained*\nn3 allocated\nn4 down*\nn5 idle~\nn6 powering_down\n"
    said = {"scontrol": (0, job), "sinfo": (0, nodes)}
    monkeypatch.setattr(controller, "run_slurm", lambda program, *_, **__: said[program])
    monkeypatch.setenv("TRNSLURM_RUN_DIR", "/runs/7")
    asks = controller.Controller("7", 0, ())
    assert [asks.can_do_without(needed, {"n1", "n4"}) for needed in (2, 4, 6)] == [3, 1, 0]
    line = "NodeName={} Arch=x86_64 State=IDLE BootTime={} SlurmdStartTime=2026-11-29T10:00:00 \n"
    times = {"n1": "2001-09-09T01:46:40", "n2": "None", "n3": "9999-01-01T00:00:00"}
    said["scontrol"] = (0, "".join(line.format(*each) for each in times.items()))
    assert [*asks.booted(times)] == ["n1"]
    said["scontrol"] = (0, job)
    said["sinfo"] = (1, "slurm_load_partitions error: Unable to contact slurm controller")
    assert asks.can_do_without(2, {"n1"}) > 1000


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("22.05.8", True), ("23.11.10", True), ("23.11.11", False), ("24.05.5", True),
        ("24.05.6", False), ("24.11.0", False), ("26.05.5-1", False), ("unknown", False),
    ],
)  # fmt: skip
def test_versions_that_hold_a_job(monkeypatch, version: str, holds: bool) -> None:
    config = f"KillWait                = 30 sec\nSLURM_VERSION           = {version}\n"
    monkeypatch.setattr(controller, "_scontrol", lambda *_, **__: (0, config))
    monkeypatch.setenv("TRNSLURM_RUN_DIR", "/runs/7")
    asks = controller.Controller("7", 0, ())
    asks.learn_config()
    assert asks.holds == holds
