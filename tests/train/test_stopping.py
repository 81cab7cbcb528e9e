"""A graceful stop: the agreement among objects that share a store, and real workers that stop."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from trnslurm.records.run import RunDir
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError
from trnslurm.train.loop import stopping
from trnslurm.train.loop.stopping import Stopping

from ..processes import alive
from ..waiting import eventually
from .attempts import Run
from .conftest import JOB, REPO
from .launches import Launches, Scenario

LAST = 30


@pytest.fixture
def team(tmp_path, monkeypatch):
    """Make workers that share a store; worker 0 looks at every step."""
    monkeypatch.setattr(stopping, "LOOK_S", 0.0)
    (tmp_path / "state").mkdir()

    def make(workers, *, lead, log_every=1000):
        store = dist.HashStore()
        worker = Environment(
            rank=0, world=workers, local_rank=0, local_world=workers, phase="train", attempt=3,
            run_dir=tmp_path, device="cpu",
        )  # fmt: skip
        return [
            Stopping(
                replace(worker, rank=rank),
                lead=lead,
                last=LAST,
                reported=lambda step: step % log_every == 0,
                store=store,
            )
            for rank in range(workers)
        ]

    return make


def ask(tmp_path):
    (tmp_path / "state" / "stop-train-3.json").write_text("{}")


def stop_of(worker, first):
    """The step after which a worker stops, which goes on from a first one; None: it does not."""
    return next(filter(worker.step_done, range(first, LAST + 1)), None)


@pytest.mark.parametrize(("lead", "ahead"), [(0, 1), (1, 1), (1, 2), (4, 0), (4, 5)])
def test_all_stop_after_one_step_however_far_a_host_is_ahead(team, tmp_path, lead, ahead):
    """Hosts end no more than `lead` steps before all workers have given their parts of them."""
    first, second, third = team(3, lead=lead)
    for step in range(1, 6):
        assert not first.step_done(step)
    # Worker 0 has ended 5 and not given 6, so that no host has ended more than 5 + lead.
    for step in range(1, 6 + min(ahead, lead)):
        assert not second.step_done(step)
    ask(tmp_path)
    agreed = stop_of(first, 6)

    assert agreed == 7 + lead
    assert stop_of(second, 6 + min(ahead, lead)) == agreed
    assert stop_of(third, 3) == agreed
    assert [one.stops_at for one in (first, second, third)] == [agreed] * 3


def test_a_host_that_was_further_ahead_says_so(team, tmp_path):
    first, second = team(2, lead=1)
    for step in range(1, 10):
        second.step_done(step)
    ask(tmp_path)
    first.step_done(5)

    with pytest.raises(TrainError, match="worker 1 has ended step 10, but all should stop aft"):
        second.step_done(10)


@pytest.mark.parametrize(("step", "agreed"), [(4, 8), (6, 10), (7, 10), (9, 10), (10, 14)])
def test_a_report_is_no_later_than_needed(team, tmp_path, step, agreed):
    [worker] = team(1, lead=3, log_every=10)
    ask(tmp_path)
    worker.step_done(step)
    assert worker.stops_at == agreed


def test_at_the_end_of_training_nobody_stops(team, tmp_path):
    first, second = team(2, lead=4)
    assert not first.step_done(LAST - 1)
    ask(tmp_path)
    assert not any(worker.step_done(LAST) for worker in (first, second))
    [late] = team(1, lead=4)
    assert not late.step_done(LAST - 1) and not late.step_done(LAST)


def test_only_worker_0_looks_for_the_file_and_tells_the_others(team, tmp_path):
    first, second = team(2, lead=0)
    assert not first.asked() and not second.asked()
    ask(tmp_path)
    assert not second.asked()
    assert first.asked() and second.asked()


def test_a_stop_that_cannot_be_noted_is_an_error(team, tmp_path, monkeypatch):
    [worker] = team(1, lead=0)
    worker.stops_at = 7
    worker.note()
    said = json.loads((tmp_path / "state" / "stopped-train-3.json").read_text())
    assert (said["step"], said["saved"]) == (7, True)

    (tmp_path / "state" / "stopped-train-3.json").unlink()
    (tmp_path / "state" / "stopped-train-3.json").mkdir()
    with pytest.raises(TrainError, match=r"stopped-train-3.json: Is a directory"):
        worker.note()


def counting(run):
    """The numbers of each step that counts; times differ from run to run."""
    keys = ("step", "samples", "loss", "grad_norm", "lr")
    return [[line[key] for key in keys] for line in RunDir(run.path).steps()]


@contextlib.contextmanager
def paused(attempt):
    """Nobody goes on, as worker 1 does not; then worker 0 looks for a request at its next step."""
    attempt.signal(1, signal.SIGSTOP)
    yield
    time.sleep(stopping.LOOK_S)
    attempt.signal(1, signal.SIGCONT)


@pytest.mark.rest
def test_a_training_stopped_and_terminated_is_that_of_an_uninterrupted_one(tmp_path):
    steps = 60
    changes = {"steps": steps, "train__save_every": 1000, "train__eval_every": 20}
    whole = Run(tmp_path / "whole", **changes)
    whole.undisturbed(1)

    run = Run(tmp_path / "stopped", **changes)
    with run.attempt(1) as attempt:  # asked to stop, as before a time limit
        attempt.reach(5)
        with paused(attempt):
            attempt.ask_to_stop()
        assert attempt.end() == 0, attempt.text()
    first = run.state("stopped-train-1")["step"]
    assert 5 < first < steps and run.checkpoints() == [first]

    with run.attempt(2) as attempt:  # terminated, and asked to stop at the same moment
        attempt.reach(first + 2)
        with paused(attempt):
            attempt.terminate()
            time.sleep(0.1)
            attempt.ask_to_stop()
        attempt.end()  # the launcher says that it was terminated
    second = run.state("stopped-train-2")["step"]
    assert first < second < steps and run.checkpoints() == [first, second]

    with run.attempt(3) as attempt:  # terminated, and nothing else
        attempt.reach(second + 2)
        attempt.signal(1, signal.SIGSTOP)  # or it may come to its end while worker 0 still waits
        attempt.terminate()
        eventually(lambda: not alive(attempt.pids[0]), said=attempt.text)
        assert alive(attempt.pids[1]), "the launcher has killed both"
        attempt.signal(1, signal.SIGCONT)
        assert attempt.end() != 0
    assert run.state("stopped-train-3") is None and run.checkpoints() == [first, second]

    assert f"resuming from step-{second:08d}" in run.undisturbed(4)
    assert run.state("stopped-train-4") is None
    assert counting(run) == counting(whole)
    assert [line[0] for line in counting(run)] == list(range(1, steps + 1))


@pytest.mark.rest
def test_on_xla_devices_too(tmp_path):
    launches = Launches(tmp_path, JOB / "text.txt")
    changes = {"steps": 6, "train__save_every": 1000, "train__eval_every": 0}
    (tmp_path / "stopped" / "state").mkdir(parents=True)
    (tmp_path / "stopped" / "state" / "stop-train-1.json").write_text("{}")
    names = ("whole", "stopped", "stopped")
    launches.launch(2, *(Scenario(name, changes) for name in names))

    keys = ("step", "loss", "grad_norm")
    whole, stopped = (launches.outcome(name) for name in ("whole", "stopped"))
    assert stopped.column("attempt") == [1, 1, 2, 2, 2, 2]
    for one, other in itertools.zip_longest(whole.metrics, stopped.metrics):
        assert [one[key] for key in keys] == [other[key] for key in keys]
    digests = [[result["parameters"] for result in one.results] for one in (whole, stopped)]
    assert digests[0] == digests[1]


BLOCKED = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from trnslurm.train.loop.stopping import follow_term

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
follow_term(lambda: False)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(1))
time.sleep(600)
"""


@pytest.mark.rest
def test_term_ends_a_worker_that_waits_in_a_collective(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(REPO), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", BLOCKED]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environ,
                         stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        for worker in workers:
            assert "ready" in iter_until(worker.stdout, "ready")
        wait_until_asleep(workers[0].pid)
        start = time.monotonic()
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(600) == stopping.TERMINATED
        assert time.monotonic() - start >= stopping.TERM_PATIENCE_S
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def iter_until(lines, word):
    return next((line for line in lines if word in line), "")


def wait_until_asleep(pid):
    """Wait until the main thread of a process uses no time any more."""
    used = None
    while used != (used := Path(f"/proc/{pid}/task/{pid}/stat").read_text().split()[13:15]):
        time.sleep(0.5)
