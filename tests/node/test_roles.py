"""The servers of roles: their machine in virtual time, a server on its node, and its health."""

from __future__ import annotations

import http.server
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import trnslurm
from trnslurm import calls
from trnslurm.contract.files import write_json
from trnslurm.contract.roles import Role, Stand
from trnslurm.contract.rundir import RunFiles
from trnslurm.node import components, controller
from trnslurm.node.roles import machine as m
from trnslurm.node.roles import program
from trnslurm.node.roles.health import why_not_ready


class World:
    """Servers that become ready 5 s after their start, and the machine that keeps them."""

    def __init__(self, *roles: Role) -> None:
        hosts, at = {}, 1
        for role in roles:
            hosts[role.name] = [f"n{at + n}" for n in range(role.all_nodes)]
            at += role.all_nodes
        self.machine = m.Machine(roles, hosts)
        self.now = 0.0
        self.ready_after_s = 5.0
        self.running: dict[tuple[str, int], float] = {}
        """When each server that runs was started."""
        self.told: list[m.Decision] = []
        self.ended: list[tuple[str, int]] = []
        self.over = False
        self.deaf: set[tuple[str, int]] = set()
        """Servers that ignore TERM."""
        self.silent: set[str] = set()
        """Nodes that do not answer."""
        self.do(self.machine.begin(0.0))

    def do(self, decisions: Sequence[m.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, m.Start):
                assert decision.server.key not in self.running
                self.running[decision.server.key] = self.now
            elif isinstance(decision, m.Signal):
                key = decision.server.key
                if key in self.running and (
                    decision.signum == signal.SIGKILL or key not in self.deaf
                ):
                    self.end(key, 0)
            elif isinstance(decision, m.Look):
                server = decision.server
                since = self.running.get(server.key, math.inf)
                there = server.host not in self.silent and self.now >= since + self.ready_after_s
                silent = server.host in self.silent
                why_not = "" if there else "refused"
                self.do(self.machine.looked(decision, self.now, why_not, silent=silent))
            elif isinstance(decision, m.Over):
                self.over = True
            else:
                self.told.append(decision)

    def server(self, role: str, number: int = 0) -> m.Server:
        return next(s for s in self.machine.servers if s.key == (role, number))

    def end(self, key: tuple[str, int], code: int, why: str = "") -> None:
        """Let a server end."""
        del self.running[key]
        self.ended.append(key)
        server = self.server(*key)
        lost = server.host in self.silent
        self.do(self.machine.ended(server, self.now, code, why, lost=lost))

    def wait(self, seconds: float) -> None:
        """Let time pass, tick by tick."""
        end = self.now + seconds
        for _ in range(100_000):
            if self.machine.wakes_at > end:
                break
            self.now = max(self.now, self.machine.wakes_at)
            self.do(self.machine.tick(self.now))
        else:
            raise AssertionError("it asks for a tick again and again")
        self.now = end

    def stands(self) -> list[str]:
        return [server.stand.value for server in self.machine.servers]

    def failures(self) -> list[m.Failed]:
        return [each for each in self.told if isinstance(each, m.Failed)]


REWARD = Role(name="reward", nodes=1, ready="tcp")
ROLLOUT = Role(name="rollout", nodes=2, spares=1, ready="tcp", ready_s=60, needs=("reward",))


def test_a_role_waits_for_the_addresses_that_it_gets() -> None:
    world = World(REWARD, ROLLOUT)
    assert world.stands() == ["starting", "waiting", "waiting"]
    world.wait(7)
    assert world.stands() == ["ready", "starting", "starting"]
    assert not world.told
    world.wait(7)
    assert world.told == [m.Ready()]


def test_a_server_that_ends_starts_again_alone() -> None:
    world = World(REWARD, ROLLOUT)
    world.wait(20)
    world.end(("rollout", 1), 137, "out of memory")
    assert world.server("rollout", 1).stand is Stand.PAUSING
    assert world.server("rollout", 1).why == "out of memory"
    world.wait(8)
    assert world.stands() == ["ready"] * 3
    assert world.told == [m.Ready()]
    assert world.server("rollout", 1).starts == 2


def test_a_server_that_ends_again_and_again_fails() -> None:
    world = World(REWARD)
    for _ in range(m.MOST_FAILURES):
        world.end(("reward", 0), 1, "ModuleNotFoundError: No module named 'vllm'")
        world.wait(60)
    (failed,) = world.failures()
    assert "reward 0 on n1 ended 5 times in a row: ModuleNotFoundError" in failed.why
    assert failed.here
    assert not failed.lost
    assert world.stands() == ["down"]
    world.do(world.machine.again(world.now))
    world.wait(6)
    assert world.stands() == ["ready"]
    assert world.told[-1] == m.Ready()


def test_failures_far_apart_are_not_in_a_row() -> None:
    world = World(REWARD)
    for _ in range(3 * m.MOST_FAILURES):
        world.wait(m.STEADY_S + 10)
        world.end(("reward", 0), 1)
    assert not world.failures()


def test_a_server_that_is_never_ready_is_ended_and_tried_again() -> None:
    world = World(Role(name="reward", nodes=1, ready="tcp", ready_s=30))
    world.ready_after_s = math.inf
    world.deaf.add(("reward", 0))
    world.wait(29)
    assert world.stands() == ["starting"]
    world.wait(2)
    assert world.stands() == ["ending"]
    world.wait(20)
    assert world.ended == [("reward", 0)]
    world.wait(600)
    (failed,) = world.failures()
    assert "not ready for 30 s: refused" in failed.why


def test_a_lost_node_is_replaced_by_a_spare_and_the_training_starts_again() -> None:
    world = World(Role(name="rollout", nodes=2, spares=1, ready="tcp"))
    world.wait(10)
    world.silent.add("n2")
    world.wait(30)
    (failed,) = world.failures()
    assert failed.lost == ("n2",)
    assert failed.here
    assert world.server("rollout", 1).host == "n3"
    world.do(world.machine.again(world.now))
    world.wait(10)
    assert world.told[-1] == m.Ready()
    world.silent.add("n3")
    world.wait(30)
    assert world.failures()[-1].lost == ("n3",)
    assert not world.failures()[-1].here


def test_a_node_lost_before_the_training_began_costs_it_nothing() -> None:
    world = World(Role(name="rollout", nodes=1, spares=1, ready="tcp"))
    world.silent.add("n1")
    world.wait(40)
    assert world.told == [m.Ready()]
    assert world.server("rollout").host == "n2"


def test_a_role_may_start_again_with_the_training() -> None:
    world = World(Role(name="store", nodes=2, ready="tcp", restart="all"))
    world.wait(10)
    world.end(("store", 0), 1, "lost its state")
    assert [each.why for each in world.failures()] == ["store 0 on n1: lost its state"]
    world.do(world.machine.again(world.now))
    world.wait(10)
    assert [server.starts for server in world.machine.servers] == [2, 2]
    assert world.told[-1] == m.Ready()
    assert len(world.failures()) == 1


def test_a_taken_port_is_left_to_its_holder_until_the_training_knows_it() -> None:
    world = World(REWARD)
    world.end(("reward", 0), m.TAKEN)
    world.end(("reward", 0), m.TAKEN)
    assert world.server("reward").ports == 2
    assert world.server("reward").failures == 0
    world.wait(10)
    world.end(("reward", 0), m.TAKEN)
    assert world.server("reward").ports == 2
    assert world.server("reward").failures == 1


def test_servers_end_in_reverse_order_and_in_time() -> None:
    world = World(REWARD, ROLLOUT)
    world.wait(20)
    world.do(world.machine.finish(world.now, 30.0))
    assert [role for role, _ in world.ended] == ["rollout", "rollout", "reward"]
    assert world.over
    world = World(REWARD, ROLLOUT)
    world.wait(20)
    world.deaf = set(world.running)
    world.do(world.machine.finish(world.now, 5.0))
    assert not world.ended
    world.wait(5)
    assert world.over
    assert not world.running


def test_an_answer_of_the_server_before_counts_for_nothing() -> None:
    world = World(REWARD)
    world.wait(10)
    late = m.Look(world.server("reward"), start=1)
    world.end(("reward", 0), 1)
    world.wait(1)
    assert world.stands() == ["starting"]
    world.do(world.machine.looked(late, world.now, ""))
    assert world.stands() == ["starting"]


def test_nothing_starts_again_while_the_job_is_being_ended() -> None:
    world = World(REWARD, ROLLOUT)
    world.wait(20)
    world.do(world.machine.hold(world.now))
    world.end(("rollout", 0), 143)
    world.wait(100)
    assert world.stands() == ["ready", "down", "ready"]
    assert not world.failures()


@pytest.mark.parametrize("seed", range(60))
def test_random_faults(seed: int) -> None:
    """Whatever ends, and whenever: once faults stop, all are ready, and an end is an end."""
    chance = random.Random(seed)
    roles = [REWARD, ROLLOUT, Role(name="store", nodes=2, ready="tcp", restart="all")]
    world = World(*roles[: chance.randint(1, 3)])
    for _ in range(chance.randint(5, 40)):
        world.wait(chance.choice([0.0, 0.3, 3.0, 20.0, 90.0]))
        world.ready_after_s = chance.choice([0.0, 1.0, 5.0, 200.0])
        fault = chance.random()
        if world.running and fault < 0.6:
            world.end(chance.choice(sorted(world.running)), chance.choice([0, 1, 137, m.TAKEN]))
        elif fault < 0.65:
            world.silent.add(chance.choice(["n2", "n3"]))
        elif fault < 0.7:
            world.silent.clear()
        if world.failures() and world.told[-1] != m.Ready():
            world.do(world.machine.again(world.now))
    world.ready_after_s = 1.0
    world.silent.clear()
    for _ in range(8):
        world.do(world.machine.again(world.now))
        world.wait(200)
    assert set(world.stands()) == {"ready"}
    assert world.told[-1] == m.Ready()
    world.deaf = {key for key in world.running if chance.random() < 0.5}
    world.do(world.machine.finish(world.now, 10.0))
    world.wait(20)
    assert world.over
    assert not world.running


# -- a server on its node


def _server(*command: str, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trnslurm.node.roles.server", "--", *command],
        env=os.environ | {"TRNSLURM_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_server_finds_its_port_taken() -> None:
    with socket.create_server(("", 0)) as holder:
        server = _server("true", port=holder.getsockname()[1])
        said, _ = server.communicate(timeout=60)
    assert server.returncode == m.TAKEN
    assert "is taken by" in said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_server_is_asked_to_end_with_all_that_it_started(signum: int, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    started, asked = tmp_path / "started", tmp_path / "asked"
    os.mkfifo(started)
    script = f"trap 'echo > {asked}; exit 7' TERM; setsid sleep 600 & echo $$ $! > {started}; wait"
    server = _server("bash", "-c", script, port=port)
    bash, child = map(int, started.read_text().split())
    if signum == signal.SIGUSR2:  # Slurm may send it to all processes of a step
        os.kill(bash, signum)
        os.kill(child, signum)
    server.send_signal(signum)
    server.communicate(timeout=60)
    assert server.returncode == 7
    assert asked.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# -- a script that asks for them


def test_a_script_waits_until_all_servers_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRNSLURM_RUN_DIR", raising=False)
    assert trnslurm.servers("rollout") == []
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no role rollout"):
        trnslurm.servers("rollout")
    run = RunFiles(tmp_path)
    stands = iter([["starting", "ready"], ["ready", "pausing"], ["ready", "ready"]])

    def pass_time(_: float) -> None:
        told = [{"stand": s, "address": f"n{i}:1"} for i, s in enumerate(next(stands))]
        run.state.mkdir(exist_ok=True)
        write_json(run.servers_file, {"rollout": told})

    monkeypatch.setattr(calls.time, "sleep", pass_time)
    run.roles_file.touch()
    assert trnslurm.servers("rollout") == ["n0:1", "n1:1"]
    assert next(stands, None) is None
    with pytest.raises(ValueError, match="the run has no role judge, only rollout"):
        trnslurm.servers("judge")


# -- its health


def test_health_by_http_tcp_and_file(tmp_path: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert why_not_ready("http://{host}:{port}/health", address, tmp_path) == ""
        assert why_not_ready("http://{host}:{port}/", address, tmp_path).endswith("/ responded 503")
        assert why_not_ready("tcp", address, tmp_path) == ""
        server.shutdown()
    assert "Connection refused" in why_not_ready("tcp", address, tmp_path)
    assert "Connection refused" in why_not_ready("http://{host}:{port}/", address, tmp_path)
    assert why_not_ready("out/up", address, tmp_path) == "out/up does not exist"
    (tmp_path / "up").touch()
    assert why_not_ready("up", address, tmp_path) == ""


def test_each_component_of_a_job_has_its_own_command() -> None:
    told = "3 7 0 reward=c1 rollout=n3,n4 -- srun a --- srun --het-group=1 b"
    words = program.read(told.split())
    assert words.hosts == {"reward": ["c1"], "rollout": ["n3", "n4"]}
    assert words.commands == [["srun", "a"], ["srun", "--het-group=1", "b"]]


def test_the_nodes_of_each_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"rollout": (1, 0), "reward": (2, 1), "judge": (1, 1)}
    told = {name: {"nodes": n, "component": c, "needs": []} for name, (n, c) in roles.items()}
    write_json(tmp_path / "roles.json", told)
    monkeypatch.setattr(components, "RUN", RunFiles(tmp_path))
    environ = {
        "TRNSLURM_SERVERS": "rollout=n3 reward=c1,c2 judge=c3", "SLURM_JOB_ID": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_JOB_ID_HET_GROUP_0": "7",
    }  # fmt: skip
    assert components.hosts_of_roles(environ) == [["n3"], ["c1", "c2", "c3"]]
    assert components.component_ids(environ) == ["7", "8"]
    assert components.hosts_of_roles({}) == [[], []]


@pytest.mark.parametrize(
    ("gone", "asked"),
    [
        ({"n2"}, []),  # scontrol does not change the first of several components
        ({"c2"}, ["update JobId=8 NodeList=c1"]),
        ({"d1"}, []),  # a component's only node
        ({"c1", "d1"}, ["update JobId=8 NodeList=c2"]),
    ],
)
def test_lost_nodes_leave_their_component(
    gone: set[str], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def scontrol(*words: str, timeout_s: float | None = None) -> tuple[int, str]:
        said.append(" ".join(words))
        return 0, ""

    monkeypatch.setattr(controller, "_scontrol", scontrol)
    monkeypatch.setattr(controller.Controller, "has_node", lambda *_: False)
    monkeypatch.setenv("TRNSLURM_RUN_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asks = controller.Controller("7", 0, ())
    asks.leave({"7": ["n1", "n2"], "8": ["c1", "c2"], "9": ["d1"]}, gone)
    assert said == asked
    asks.leave({"7": ["n1", "n2"]}, {"n2"})
    assert said[len(asked) :] == ["update JobId=7 NodeList=n1"]
