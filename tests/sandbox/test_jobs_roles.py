"""Servers beside a training on a real Slurm: what ends, and what starts again alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trnslurm.records.run import RunDir

from ..waiting import eventually
from .jobs import Run, User

pytestmark = pytest.mark.rest

SERVE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"0.5")
    def log_message(self, *_):
        pass
print("of", *sys.argv[2:], flush=True)
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
"""
# Asks each server at each step, waits for those that are away, and saves each tenth step. Before
# the last ten it waits until the test has done what it wants to.
LOOP = """
import json, os, sys, time, urllib.request
from pathlib import Path
import trnslurm
steps, saves, servers, resume = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
first = json.loads(Path(resume[0]).read_text())["step"] + 1 if resume else 1
print("asks", servers, "from", first, flush=True)
def ask(url):
    while True:
        try:
            return float(urllib.request.urlopen(url, timeout=5).read())
        except OSError:
            trnslurm.servers("rollout")
            time.sleep(0.2)
for step in range(first, steps + 1):
    while step > steps - 10 and not (saves / "go").exists():
        time.sleep(0.1)
    loss = sum(map(ask, servers.split(","))) / step
    if os.environ["RANK"] == "0":
        trnslurm.report(step=step, steps=steps, loss=loss)
        if step % 10 == 0:
            (file := saves / f"step-{step:08d}.json").write_text(json.dumps({"step": step}))
            trnslurm.saved(step, file)
    if trnslurm.should_stop():
        break
    time.sleep(0.1)
"""
ROLLOUT = 'roles.rollout.command=[python, project/serve.py, "{port}", "{server}"]'


def submit(user: User, place: Path, nodes: int, steps: int, *settings: str) -> Run:
    """Submit a training with servers."""
    (place / "project").mkdir()
    (place / "project/serve.py").write_text(SERVE)
    (place / "project/loop.py").write_text(LOOP)
    words = user.options(nodes, "device=cpu", "devices=[cpu]", "workers_per_node=1")
    more = [part for setting in settings for part in ("--set", setting)]
    given = (str(steps), "{checkpoints}", "{rollout.urls}", "{resume}")
    script = str(place / "project/loop.py")
    return user._submit(script, *words, "--time", "20", *more, "--", *given)


def servers(user: User, run: Run) -> dict[str, Any]:
    """What status tells of the servers, by role and number."""
    told = json.loads(user.trnslurm("status", run.path.name, "--json"))["servers"]
    return {f"{each['role']} {each['number']}": each for each in told}


def test_a_server_starts_again_alone(user: User, tmp_path: Path) -> None:
    """The training goes on; when a worker is killed the servers do; all end with the training."""
    judge = 'roles.judge.command=[python, project/serve.py, "{port}", "{rollout.addresses}"]'
    health = "roles.rollout.ready=http://{host}:{port}/health"
    settings = (ROLLOUT, "roles.rollout.nodes=2", health, judge)
    run = submit(user, tmp_path, 1, 150, *settings)
    directory = RunDir(run.path)
    eventually(lambda: directory.last_metrics().get("step", 0) > 5)
    before = servers(user, run)
    assert {name: each["stand"] for name, each in before.items()} == dict.fromkeys(
        ("rollout 0", "rollout 1", "judge 0"), "ready"
    )
    assert "rollout: 2 of 2 servers ready (compute-dy-trn1-2,compute-dy-trn1-3)" in user.trnslurm(
        "status", run.path.name
    )
    addresses = ",".join(before[f"rollout {number}"]["address"] for number in range(2))
    judge_log = user.trnslurm("logs", run.path.name, "--role", "judge")
    assert f"of {addresses}\n" in judge_log
    user.sandbox.fault("proc", "3", "python.*serve.py", "KILL")
    eventually(lambda: servers(user, run)["rollout 1"]["starts"] == 2)
    eventually(lambda: servers(user, run)["rollout 1"]["stand"] == "ready")
    step = directory.last_metrics()["step"]
    eventually(lambda: directory.last_metrics()["step"] > step + 10)
    user.sandbox.fault("proc", "1", "python.*loop.py", "KILL")
    (run.path / "checkpoints/go").touch()
    run.until("COMPLETED")
    assert [each.state for each in directory.attempts("train")] == ["RESTARTED", "COMPLETED"]
    after = servers(user, run)
    assert {name: (each["starts"], each["address"]) for name, each in after.items()} == {
        name: (2 if name == "rollout 1" else 1, each["address"]) for name, each in before.items()
    }
    losses = {line["step"]: line["loss"] for line in directory.steps()}
    assert losses == {step: 1.0 / step for step in range(1, 151)}
    # They end once the training's own end is recorded.
    of_server = ("logs", run.path.name, "--role", "rollout", "--node", "1")
    eventually(lambda: "ending the server on request" in user.trnslurm(*of_server))
    eventually(lambda: not user.sandbox.processes_of(run))
    lines = (run.path / "state/servers.jsonl").read_text().splitlines()
    own = [told["stand"] for told in map(json.loads, lines)
           if (told["role"], told["number"]) == ("rollout", 1)]  # fmt: skip
    assert own[-1] == "down" and [*dict.fromkeys(own)][:3] == ["starting", "ready", "pausing"]
    assert own.count("starting") == own.count("ready") == 2


def test_a_spare_takes_the_place_of_a_lost_server(user: User, tmp_path: Path) -> None:
    """The training starts again in its job, with the new address."""
    run = submit(user, tmp_path, 2, 120, ROLLOUT, "roles.rollout.spares=1")
    directory = RunDir(run.path)
    eventually(lambda: directory.last_metrics().get("step", 0) > 10)
    before = servers(user, run)["rollout 0"]
    user.sandbox.fault("3", "power-off")
    (run.path / "checkpoints/go").touch()
    run.until("COMPLETED")
    user.sandbox.fault("3", "power-on")
    first, last = directory.attempts("train")
    assert (first.state, last.state) == ("RESTARTED", "COMPLETED")
    assert "compute-dy-trn1-3, the node of rollout 0, is lost" in first.reason
    after = servers(user, run)["rollout 0"]
    assert (before["host"], after["host"]) == ("compute-dy-trn1-3", "compute-dy-trn1-4")
    log = (run.path / "logs/train-2-node1.log").read_text()
    assert f"asks http://{after['address']} from " in log
    assert {line["step"] for line in directory.steps()} == {*range(1, 121)}


def test_a_server_in_another_partition(user: User, tmp_path: Path) -> None:
    """It starts again alone, its nodes are requeued with the others, and end with the training."""
    run = submit(user, tmp_path, 2, 60, ROLLOUT, "roles.rollout.partition=shared")
    directory = RunDir(run.path)
    eventually(lambda: directory.last_metrics().get("step", 0) > 10)
    asked = ("--noheader", "--format=%i %P %D %T")
    job = run.jobs["train"]
    assert {*user.sandbox.slurm("squeue", *asked).ok.splitlines()} == {
        f"{job}+0 compute 2 RUNNING", f"{job}+1 shared 1 RUNNING",
    }  # fmt: skip
    assert user.trnslurm("exec", run.path.name, "--", "hostname") == "compute-dy-trn1-1\n"
    host = servers(user, run)["rollout 0"]["host"]
    assert host not in directory.attempts("train")[0].hosts
    user.sandbox.fault("proc", host.rpartition("-")[2], "python.*serve.py", "KILL")
    eventually(lambda: servers(user, run)["rollout 0"]["starts"] == 2)
    eventually(lambda: servers(user, run)["rollout 0"]["stand"] == "ready")
    user.sandbox.slurm("scontrol", "requeue", job)
    (run.path / "checkpoints/go").touch()
    run.until("COMPLETED")
    first, last = directory.attempts("train")
    assert (first.state, first.nodes, last.state, last.nodes) == ("REQUEUED", 3, "COMPLETED", 3)
    assert {line["step"] for line in directory.steps()} == {*range(1, 61)}
    eventually(lambda: not user.sandbox.queue() and not user.sandbox.processes_of(run))
