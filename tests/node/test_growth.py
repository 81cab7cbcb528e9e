"""When a training on fewer nodes than it may have gives way to one on more."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.states import EndCause
from trnslurm.node import controller, growth
from trnslurm.node.controller import Controller
from trnslurm.node.growth import Growth


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path) -> dict[str, Any]:
    """The time, and what Slurm has; the run's plan has 1,000 steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "train.sbatch").touch()
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 1000}))
    facts: dict[str, Any] = {"now": 0.0, "free": True, "asked": 0}
    monkeypatch.setattr(growth.time, "monotonic", lambda: facts["now"])
    return facts


class Free:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def has_free(self, nodes: int, script: Path) -> bool:
        assert (nodes, script) == (2, Path("train.sbatch"))
        self.facts["asked"] += 1
        return bool(self.facts["free"])


def growth_of(at: dict[str, Any], hosts: str = "a,b") -> Growth:
    state = Attempt(phase="train", attempt=3, hosts=hosts, checkpoint=100)
    return Growth(state, Free(at), 1800.0)  # type: ignore[arg-type]


def test_it_waits_and_asks_seldom(at: dict[str, Any]) -> None:
    grows = growth_of(at)
    at["free"] = False
    for at["now"] in range(0, 3600, 10):
        assert not grows.wanted([1, 2, 3, 4])
    assert at["asked"] == 30  # every minute, after half an hour
    at["free"], at["now"] = True, 3600
    assert grows.wanted([1, 2, 3, 4]) == 4
    assert grows.wanted([1, 2]) == 0


@pytest.mark.parametrize(
    ("step", "wanted"),
    [(100, 4), (500, 4), (900, 0)],  # of 1,000, begun at 100: half an hour, then all is unknown
)
def test_what_is_left_must_be_worth_it(at: dict[str, Any], step: int, wanted: int) -> None:
    """On twice as many nodes the rest takes half as long; 900 steps took 2,000 s."""
    grows = growth_of(at)
    Path("metrics.jsonl").write_text(json.dumps({"attempt": 3, "step": step}) + "\n")
    at["now"] = 2000.0
    assert grows.wanted([4]) == wanted


def test_not_twice_in_vain(at: dict[str, Any]) -> None:
    """It was started again for more nodes, and Slurm gave it as many as before."""
    before = {"cause": EndCause.GROWS, "hosts": "a,b"}
    Path("state/train-2.json").write_text(json.dumps(before))
    grows, more = growth_of(at), growth_of(at, "a,b,c")
    at["now"] = 2000.0
    assert not grows.wanted([4]) and not at["asked"]
    assert not more.wanted([3])
    Path("state/train-2.json").write_text(json.dumps(before | {"cause": "crash"}))
    assert grows.wanted([4]) == 4


# As Slurm 22.05 and 24.11 say it.
SOON, LATE = 1, 4000
STARTS = "sbatch: Job 12 to start at {} using 8 processors on nodes n[3-4] in partition queue1"
OLDER = "sbatch: Job 12 to start at {} using 8 processors on n[3-4]"


@pytest.mark.parametrize(
    ("starts", "in_s", "waiting", "states", "free"),
    [
        (STARTS, SOON, "", "n3 idle\nn4 idle\n", True),
        (OLDER, SOON, "Dependency\n", "n3 idle\nn4 mixed\nn4 mixed\n", True),
        (STARTS, LATE, "", "n3 idle\nn4 idle\n", False),
        (STARTS, SOON, "Priority\n", "n3 idle\nn4 idle\n", False),
        (STARTS, SOON, "", "n3 idle\nn4 idle~\n", False),  # it would have to boot
        ("allocation failure: Requested node configuration is not available", SOON, "", "", False),
    ],
)
def test_what_slurm_has(
    monkeypatch: pytest.MonkeyPatch, starts: str, in_s: int, waiting: str, states: str, free: bool
) -> None:
    when = datetime.now() + timedelta(seconds=in_s)
    said = {
        "sbatch": starts.format(when.isoformat(timespec="seconds")),
        "squeue": waiting,
        "sinfo": states,
    }
    said["scontrol"] = "JobId=7 Partition=queue1 JobState=RUNNING\n"
    monkeypatch.setattr(controller, "run_slurm", lambda name, *_, **__: (0, said[name]))
    monkeypatch.setenv("TRNSLURM_RUN_DIR", "/runs/x")
    assert Controller("7", 0, ()).has_free(2, Path("train.sbatch")) is free
