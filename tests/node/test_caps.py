"""What a run may use over all attempts: counted from state files, and kept to by an attempt."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.times import utc_time
from trnslurm.node.caps import Caps
from trnslurm.node.ending import how_it_ended

from .test_attempt import SAVES, STOPS, Script
from .test_ending import facts

HOURS = {"node_hours": 2.0, "key": "slurm.max_cost", "stop_before_s": 300}


@pytest.fixture
def script(bench: Any) -> Script:
    return Script(bench)


def spent(run: RunFiles, phase: str, attempt: int, seconds: float, **state: Any) -> None:
    """Write the state of an attempt that took `seconds`, and ended a day ago."""
    run.state.mkdir(parents=True, exist_ok=True)
    ended = time.time() - 86400
    known = {"started": utc_time(ended - seconds), "ended": utc_time(ended), "nodes": 2}
    known |= {"state": "COMPLETED", "hosts": "a"}
    run.state_file(phase, attempt).write_text(json.dumps(known | state))


def test_node_hours_of_all_attempts_phases_and_jobs(tmp_path) -> None:
    run = RunFiles(tmp_path / "run")
    spent(run, "precompile", 1, 900)
    spent(run, "train", 1, 900, nodes=0, hosts="a,b")  # of an earlier trnslurm
    caps = Caps(run, HOURS)
    assert caps.reached("train", 2) == ""
    # It was killed half an hour ago: its log says when it last did anything.
    begun = utc_time(time.time() - 3600)
    spent(run, "train", 2, 0, state="RUNNING", ended=None, started=begun)
    run.logs.mkdir()
    for file in (run.node_log("train", 2, 0), run.state_file("train", 2)):
        file.touch()
        os.utime(file, (time.time() - 1800,) * 2)
    assert caps.reached("train", 3) == "slurm.max_cost"
    assert caps.words("slurm.max_cost") == "it has used its 2 node-hours (slurm.max_cost)"
    assert Caps(run, HOURS | {"node_hours": 2.01}).reached("train", 3) == ""
    # While it shows life, its time goes on.
    run.heartbeat_file.touch()
    assert Caps(run, HOURS | {"node_hours": 2.9}).reached("train", 3)


def test_runs_of_a_sweep_share_the_node_hours(tmp_path) -> None:
    mine, other, foreign = (RunFiles(tmp_path / f"g-{n}") for n in (1, 2, 3))
    for run, group in ((mine, "g"), (other, "g"), (foreign, "g-3")):
        spent(run, "train", 1, 1900)
        run.record_file.write_text(json.dumps({"group": group}))
    caps = Caps(mine, HOURS)
    assert caps.words(caps.reached("train", 2)) == (
        "its sweep has used its 2 node-hours (slurm.max_cost)"
    )
    other.record_file.write_text("{}")
    assert caps.reached("train", 2) == ""


def test_attempts_are_capped(tmp_path) -> None:
    caps = Caps(RunFiles(tmp_path), {"attempts": 3})
    assert [caps.reached("train", n) for n in (3, 4)] == ["", "slurm.max_attempts"]
    assert caps.reached("precompile", 4) == ""


@pytest.mark.parametrize(
    ("known", "ended"),
    [
        ({"stop": "time limit", "saved": 40}, ("STOPPED", "time limit; saved step 40; not")),
        ({"why": "boom"}, ("FAILED", "crash 1 of 3 without a new checkpoint: boom; not")),
        ({"stop": "cap", "saved": 40}, ("STOPPED", "used up; saved step 40")),
        ({"stop": "cap", "newest": 20}, ("STOPPED", "used up; step 20 was saved before")),
    ],
)
def test_the_last_attempt_is_not_followed_by_another(known, ended) -> None:
    progress = {"newest": 40} if "saved" in known else {}
    ending = how_it_ended(facts(capped="used up", **{**progress, **known}))
    assert ending.cause == "cap"
    state, reason = ended
    assert ending.state == state
    assert ending.reason == reason.replace("; not", "; not started again: used up")


def test_workers_save_before_the_node_hours_are_used(script: Script) -> None:
    run = RunFiles(script.bench.directory)
    script.bench.script("caps.json", json.dumps(HOURS | {"node_hours": 40.01}))
    script.with_change("trnslurm.node.attempt.machine as m; m.LOOK_S = 0.05")
    script.step((STOPS + SAVES).replace("train-1", "train-2"))  # it has begun months ago
    spent(run, "train", 1, 20 * 3600)
    assert script.run(attempt=2) != 0
    state = script.state(2)
    assert (state["state"], state["cause"]) == ("STOPPED", "cap")
    assert state["reason"] == ("it has used its 40.01 node-hours (slurm.max_cost); saved step 20")
    assert not script.asked("requeue")
    # The next one does not even begin.
    script.step("touch begun\n")
    script.bench.script("caps.json", json.dumps(HOURS | {"node_hours": 40}))
    assert script.run(attempt=3) == 1
    assert script.state(3)["reason"] == "it has used its 40 node-hours (slurm.max_cost)"
    assert not script.bench.has("begun")


def test_a_run_that_needs_no_more_steps_is_complete(script: Script) -> None:
    """Also if it starts again: Slurm may requeue it as it ends."""
    run = RunFiles(script.bench.directory)
    run.state.mkdir(exist_ok=True)
    script.with_change("trnslurm.node.attempt.machine as m; m.LOOK_S = 0.05")
    enough = '{"why": "eval/accuracy was best at step 7: 0.5"}'
    script.step(f"echo '{enough}' > state/enough.json\n" + STOPS + SAVES)
    assert script.run() == 0
    why = "ended early: eval/accuracy was best at step 7: 0.5"
    assert script.ended() == ("COMPLETED", f"{why}; saved step 20")
    assert script.state(1)["cause"] == "enough"
    script.step("touch begun\n")
    assert script.run(attempt=2) == 0
    assert (script.state(2)["state"], script.state(2)["reason"]) == ("COMPLETED", why)
    assert not script.bench.has("begun")


def test_a_script_that_cannot_stop_is_ended_once_it_needs_no_more(script: Script) -> None:
    script.with_change(
        "trnslurm.node.attempt.machine as m, trnslurm.node.caps as c; "
        "m.LOOK_S = c._ENOUGH_GRACE_S = 0.05"
    )
    script.step('echo \'{"why": "x"}\' > state/enough.json; exec sleep 600\n')
    assert script.run() == 0
    assert script.ended() == ("COMPLETED", "ended early: x")


def test_workers_that_do_not_stop_are_ended(script: Script) -> None:
    script.bench.script("caps.json", json.dumps(HOURS | {"node_hours": 1e-9}))
    script.with_change(
        "trnslurm.node.attempt.machine as m, trnslurm.node.caps as c; "
        "m.LOOK_S = c._LEAST_GRACE_S = 0.05; c.Caps.reached = lambda *_: ''"
    )
    script.step("touch logs/train-1-node0.log; exec sleep 600\n")
    assert script.run() != 0
    assert script.ended() == ("STOPPED", "it has used its 1e-09 node-hours (slurm.max_cost)")
