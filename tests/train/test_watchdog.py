"""The watchdog: who is blamed, and workers that are frozen in a real training."""

import json
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from trnslurm.train.background import Asker
from trnslurm.train.devices.device import Timer
from trnslurm.train.environment import Environment
from trnslurm.train.loop import watchdog
from trnslurm.train.loop.watchdog import EXIT_CODE, Sign, Standstill, Watchdog, describe, judge

from .attempts import Run

LEAST_S = 8
# Steps that save and evaluate are among them, on a machine with other work.
CHANGES = {
    "steps": 2000,
    "train__save_every": 7,
    "train__eval_every": 5,
    "train__watchdog": 10.0,
    "train__watchdog_min_s": LEAST_S,
}


def sign(turn, step=9, beats=40, doing="collectives", node=0):
    return Sign(turn=turn, step=step, beats=beats, doing=doing, node=node, host=f"host-{node}")


def test_a_worker_that_takes_no_turn_is_frozen():
    before = [sign(5), sign(6), sign(5)]
    stall = judge(before, [sign(8), sign(6, step=10, beats=45), sign(8)])
    assert stall == Standstill(workers=(1,), reason=stall.reason, frozen=True)
    said = describe(stall, before, seconds=130, step=11)
    assert said["step"] == 11, "it may have come further than it could say"


def test_else_the_one_furthest_behind_holds_up_the_others():
    before = [sign(1), sign(1), sign(1)]
    assert judge(before, [sign(4), sign(4), sign(4, beats=39)]).workers == (2,)
    assert judge(before, [sign(4, beats=2), sign(4, step=8), sign(4)]).workers == (1,)


def test_nobody_is_blamed_for_waiting_where_all_wait():
    stall = judge([sign(1), sign(1)], [sign(4), sign(4)])
    assert stall.workers == ()
    line = describe(stall, [], seconds=130, step=9)["line"]
    assert line.startswith(
        "no worker has made any progress for 130 s in step 9: all workers wait at"
    )


def test_nor_while_one_saves():
    saving = sign(4, doing="checkpoint", beats=3)
    assert judge([sign(1), sign(1)], [sign(4), saving]) is None
    frozen_in_it = judge([sign(1), saving], [sign(4), saving])
    assert frozen_in_it.workers == (1,)


def test_the_first_worker_to_notice_is_the_one_that_reports(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "leave", lambda code: None)

    def give_up(rank):
        environment = Environment(
            rank=rank, world=2, local_rank=rank, local_world=2, phase="train", attempt=1,
            run_dir=tmp_path, device="cpu",
        )  # fmt: skip
        device = SimpleNamespace(beats=0, timer=Timer())
        dog = Watchdog(device, environment, factor=0.0, least_s=1.0)
        dog._give_up(time.monotonic(), [], Standstill(reason="all wait"))
        return capfd.readouterr().err.count("error: no worker has made any progress")

    assert give_up(0) == 1, "where nothing can be written"
    (tmp_path / "state").mkdir()
    assert (give_up(1), give_up(0)) == (1, 0)
    record = json.loads((tmp_path / "state/stuck-train-1.json").read_text())
    assert record["reported_by"] == 1


def test_a_verdict_is_one_line_and_its_parts():
    stall = Standstill(workers=(1, 2), reason="it does not answer")
    said = describe(stall, [sign(1), sign(1, step=41, node=3), sign(1)], seconds=130, step=42)
    assert said == {
        "rank": 1, "node": 3, "host": "host-3", "step": 41, "seconds": 130,
        "line": "worker 1 (node 3, host-3) has made no progress for 130 s in step 41: it does not "
        "answer (and 1 more)",
    }  # fmt: skip


def test_who_never_answers_is_asked_once():
    asked, release, calls = threading.Event(), threading.Event(), []

    def question():
        calls.append(1)
        asked.set()
        release.wait(600)
        return 7

    ask = Asker("test")
    assert ask(question, patience_s=0.05) is None
    assert ask(question, patience_s=0.05) is None
    assert asked.wait(600) and len(calls) == 1
    release.set()
    while ask(lambda: 8, patience_s=1) != 8:
        time.sleep(0.01)
    assert ask(lambda: 1 // 0, patience_s=1) is None


@pytest.mark.rest
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_frozen_worker_is_named_by_another(tmp_path, rank):
    run = Run(tmp_path / "run", **CHANGES)
    with run.attempt(1) as attempt:
        attempt.reach(16)
        attempt.signal(rank, signal.SIGSTOP)
        attempt.wait_for(lambda: run.state("stuck-train-1"), "record of who is stuck")
        attempt.signal(rank, signal.SIGCONT)
        assert attempt.end() != 0

    stuck = run.state("stuck-train-1")
    assert (stuck["rank"], stuck["node"], stuck["reported_by"]) == (rank, 0, 1 - rank)
    assert stuck["seconds"] >= LEAST_S and stuck["step"] >= 16
    who = f"worker {rank} (node 0, {stuck['host']}) has made no progress for "
    assert stuck["line"].startswith(who)
    text = attempt.text()
    assert text.count(f"error: {stuck['line']}\n") == 1
    before, _, stacks = text.partition(f"no progress: stacks of worker {1 - rank} (node 0, ")
    assert "no progress" not in before, "a false alarm"
    assert "all_reduce" in stacks and "train.py" in stacks
    assert f" failed: exit code {EXIT_CODE} of PID " in text
    assert run.checkpoints(), "saved before"


@pytest.mark.rest
def test_a_first_node_that_does_not_answer_is_named(tmp_path):
    run = Run(tmp_path / "run", **CHANGES)
    with run.attempt(1, torchrun=True) as attempt:
        attempt.reach(8)
        attempt.process.send_signal(signal.SIGSTOP)  # torchrun, which keeps the workers' store
        attempt.wait_for(lambda: run.state("stuck-train-1"), "record of who is stuck")
        attempt.process.send_signal(signal.SIGCONT)
        assert attempt.end() != 0

    stuck = run.state("stuck-train-1")
    assert stuck["rank"] is None
    assert "node 0 (127.0.0.1) does not answer" in stuck["line"]
    assert "stacks of worker" in attempt.text()
