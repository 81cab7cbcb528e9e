"""The program that runs a job's role servers, a child of trnslurm.node.attempt.

    python -m trnslurm.node.roles FD JOB RESTARTS rollout=node-5,node-6 … -- srun …

It reports events to the parent through the file descriptor FD, as lines of JSON. On stdin it gets
the orders `again`, `hold` and `finish SECONDS`. The command starts one server: it is srun on the
server's node, or srun's stand-in. A heterogeneous job has a command for each component, separated
by ---.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from trnslurm.contract.files import write_json
from trnslurm.contract.options import BESIDE
from trnslurm.contract.roles import read_roles, variables_of
from trnslurm.contract.variables import Variable
from trnslurm.node import ports, processes
from trnslurm.node.address import ipv4
from trnslurm.node.components import component_ids
from trnslurm.node.controller import controller_of, run_slurm
from trnslurm.node.roles import machine as m
from trnslurm.node.roles.health import why_not_ready
from trnslurm.node.state import RUN
from trnslurm.node.triage.budget import budget
from trnslurm.node.triage.diagnosis import diagnose

_AT_ONCE = 1 << 16
_ORPHANED_S = 5.0
"""How long servers may take to end when the attempt program is gone."""
_SLURM_S = 30.0
_HERE = "127.0.0.1"
_APART = 100
"""The distance between the port of a node's preflight and the port of its server."""
_Event = Callable[[float], list[m.Decision]]


def main(argv: Sequence[str]) -> int:
    """Run the servers until the attempt program ends; return 0."""
    signals, parent = processes.SignalQueue(), os.getppid()
    processes.die_with_parent(parent)
    processes.become_subreaper()
    try:
        return Program(read(argv), signals).run()
    finally:
        processes.end_descendants()


class Words(NamedTuple):
    """The arguments of the command line."""

    tells: int
    """The file descriptor that the attempt program reads."""
    job: str
    restarts: int
    """How many times Slurm has restarted the job."""
    hosts: Mapping[str, Sequence[str]]
    """The nodes of each role."""
    commands: Sequence[Sequence[str]]
    """The command that starts a server in each component of the job."""


def read(argv: Sequence[str]) -> Words:
    """Parse the command line."""
    at = argv.index("--")
    tells, job, restarts, *roles = argv[:at]
    told = [each.partition("=") for each in roles]
    hosts = {name: nodes.split(",") for name, _, nodes in told}
    commands: list[list[str]] = [[]]
    for word in argv[at + 1 :]:
        if word == BESIDE:
            commands.append([])
        else:
            commands[-1].append(word)
    return Words(int(tells), job, int(restarts), hosts, commands)


class Program:
    """All servers for a job."""

    def __init__(self, words: Words, signals: processes.SignalQueue) -> None:
        self._words, self._signals = words, signals
        self._controller = controller_of(words.job, words.restarts, ())
        roles = read_roles(RUN.roles_file)
        self._machine = m.Machine(roles, words.hosts)
        self._running: dict[int, m.Server] = {}
        """The servers by the pids of their srun processes."""
        self._pids: dict[tuple[str, int], int] = {}
        self._addresses: dict[tuple[str, int], str] = {}
        self._logs: dict[tuple[str, int], int] = {}
        """The number of each server's newest log."""
        self._starts = {role.name: RUN.last_server_log(role.name) for role in roles}
        self._written: Mapping[str, Any] = {}
        self._results: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        self._usable_ports = ports.usable_ports(ports.ephemeral_range())
        self._over = self._orphaned = False

    def run(self) -> int:
        """Run the servers until all have ended for good."""
        self._end_left_over()
        self._do(self._machine.begin(time.monotonic()))
        while not self._over:
            self._record()
            wakes_at = self._machine.wakes_at
            within_s = None if wakes_at == math.inf else max(0.0, wakes_at - time.monotonic())
            arrived, _ = self._signals.wait(within_s, [self._woken, *self._told_by()])
            with suppress(BlockingIOError):
                os.read(self._woken, _AT_ONCE)
            self._reap()
            if arrived & processes.END_SIGNALS:
                self._do(self._machine.finish(time.monotonic(), _ORPHANED_S))
            self._listen()
            with suppress(queue.Empty):
                while True:
                    self._do(self._results.get_nowait()(time.monotonic()))
            if time.monotonic() >= self._machine.wakes_at:
                self._do(self._machine.tick(time.monotonic()))
        self._record()
        return 0

    # -- what happens

    def _told_by(self) -> list[int]:
        return [] if self._orphaned else [0]

    def _listen(self) -> None:
        """Follow the attempt program's orders. When it ends, the servers end too."""
        if self._orphaned or not select.select([0], [], [], 0)[0]:
            return
        said = os.read(0, _AT_ONCE).decode()
        now = time.monotonic()
        for word, _, value in (line.partition(" ") for line in said.splitlines()):
            if word == "again":
                self._do(self._machine.again(now))
            elif word == "hold":
                self._do(self._machine.hold(now))
            elif word == "finish":
                self._do(self._machine.finish(now, float(value)))
        if not said:
            self._orphaned = True
            self._do(self._machine.finish(now, _ORPHANED_S))

    def _reap(self) -> None:
        for pid, server in [*self._running.items()]:  # not the children of threads
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid], self._pids[server.key]
                code, log = processes.exit_code(status), self._logs[server.key]
                end = self._ended(server, code)
                if self._machine.finishes:
                    self._do(end(time.monotonic()))
                else:
                    self._answer(partial(self._end_of, server, code, server.host, log), end)

    def _end_of(self, server: m.Server, code: int, host: str, log: int) -> _Event:
        """Find out why a server has ended, and whether its node still responds."""
        lost = bool(self._controller.silent([host]))
        why = ""
        if code not in (0, m.TAKEN) and not lost:
            with suppress(Exception), budget():
                found = diagnose(RUN.path, server.role.name, log)
                why = found.line if found else ""
        return self._ended(server, code, why, lost=lost)

    def _ended(self, server: m.Server, code: int, why: str = "", *, lost: bool = False) -> _Event:
        return lambda now: self._machine.ended(server, now, code, why, lost=lost)

    def _answer(self, task: Callable[[], _Event], otherwise: _Event) -> None:
        """Run a task in the background. Its result is an event."""

        def do() -> None:
            try:
                self._results.put(task())
            except Exception:
                processes.say(traceback.format_exc())
                self._results.put(otherwise)
            os.write(self._wakes, b"x")

        threading.Thread(target=do, daemon=True).start()

    # -- what is to be done

    def _do(self, decisions: Sequence[m.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, m.Start):
                self._start(decision.server)
            elif isinstance(decision, m.Look):
                unknown = partial(self._machine.looked, decision, why_not="nobody knows")
                self._answer(partial(self._look, decision), unknown)
            elif isinstance(decision, m.Signal):
                self._signal(decision.server, decision.signum)
            elif isinstance(decision, m.Ready):
                self._tell({"ready": self._variables()})
            elif isinstance(decision, m.Failed):
                log = 0 if decision.lost else self._logs.get(decision.server.key, 0)
                name = f"{decision.server.role.name}-{log}"
                self._tell({"failed": {"log": name, **_told(decision)}})
            else:
                self._over = True

    def _start(self, server: m.Server) -> None:
        role, number = server.role, server.number
        host = self._address(server.host)
        port = self._port(server)
        self._addresses[server.key] = f"{host}:{port}"
        self._starts[role.name] += 1
        self._logs[server.key] = start = self._starts[role.name]
        values = {"role": role.name, "host": server.host, "number": number, "start": start}
        own = {
            Variable.PHASE: role.name,
            Variable.ATTEMPT: str(start),
            Variable.SERVER: str(number),
            Variable.HOST: host,
            Variable.PORT: str(port),
            Variable.HOSTS: server.host,
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._port(server, _APART)),
        }
        pid = processes.spawn(
            [_filled(word, values) for word in self._words.commands[role.component]],
            environ={**os.environ, **self._variables(role.needs), **own},
            own_session=self._controller.own_session,
        )
        self._running[pid], self._pids[server.key] = server, pid
        processes.say(f"roles: starting {server.title} at {host}:{port}")

    def _address(self, host: str) -> str:
        if not self._controller.requeues:
            return _HERE
        self._controller.learn_addresses([host])
        known = self._controller.address_of(host)
        return ipv4(known[0] if known else host) or host

    def _port(self, server: m.Server, apart: int = 0) -> int:
        """Return a server's port: the next one after another job's program has taken one."""
        place = f"{self._words.job}.{server.role.name}.{server.number}"
        return ports.port_of(place, apart + server.ports, self._usable_ports)

    def _variables(self, roles: Sequence[str] | None = None) -> dict[str, str]:
        found: dict[str, str] = {}
        for role in self._machine.roles:
            if roles is None or role.name in roles:
                keys = [(role.name, number) for number in range(role.nodes)]
                found |= variables_of(role.name, [self._addresses[key] for key in keys])
        return found

    def _look(self, look: m.Look) -> _Event:
        server = look.server
        why_not = why_not_ready(
            server.role.ready, self._addresses[server.key], RUN.path.absolute() / "work"
        )
        silent = bool(why_not) and bool(self._controller.silent([server.host]))
        return lambda now: self._machine.looked(look, now, why_not, silent=silent)

    def _signal(self, server: m.Server, signum: int) -> None:
        if pid := self._pids.get(server.key):
            gentle = signum == signal.SIGTERM
            processes.send(pid, self._controller.ends_step_by if gentle else signum)

    def _tell(self, told: Mapping[str, Any]) -> None:
        with suppress(OSError):
            os.write(self._words.tells, f"{json.dumps(told)}\n".encode())

    def _record(self) -> None:
        """Write the state of each server, if it has changed."""
        told: dict[str, list[dict[str, Any]]] = {role.name: [] for role in self._machine.roles}
        ago = time.time() - time.monotonic()
        for server in self._machine.servers:
            told[server.role.name].append({
                "host": server.host, "address": self._addresses.get(server.key, ""),
                "stand": server.stand, "since": round(server.since + ago, 1),
                "starts": server.starts, "log": self._logs.get(server.key, 0), "why": server.why,
            })  # fmt: skip
        if told != self._written:
            before, self._written = self._written, told
            with suppress(OSError):
                write_json(RUN.servers_file, told)
            with suppress(OSError), RUN.server_changes_file.open("a", encoding="ascii") as file:
                for line in _changes(before, told):
                    file.write(f"{json.dumps(line)}\n")

    def _end_left_over(self) -> None:
        """End the servers that a program on a lost first node has left behind."""
        # In a job that the user holds, nothing is left, and another run may have such steps.
        if not self._controller.requeues or self._controller.in_step:
            return
        # squeue has the steps of a component by its own id only (22.05).
        jobs = dict.fromkeys([self._words.job, *component_ids(os.environ)])
        of_job = ("-h", "-s", "-j", ",".join(jobs), "-o", "%i %j")
        _, said = run_slurm("squeue", *of_job, timeout_s=_SLURM_S)
        names = "|".join(role.name for role in self._machine.roles)
        if left := re.findall(rf"(?m)^(\S+) (?:{names})-\d+$", said):
            run_slurm("scancel", *left, timeout_s=_SLURM_S)


def _changes(
    before: Mapping[str, Sequence[Any]], told: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a line for each server whose state or host has changed."""
    for role, servers in told.items():
        for number, server in enumerate(servers):
            was = before[role][number] if role in before else {}
            if (was.get("stand"), was.get("host")) != (server["stand"], server["host"]):
                names = ("host", "stand", "since", "starts", "why")
                yield {"role": role, "number": number, **{name: server[name] for name in names}}


def _told(failed: m.Failed) -> dict[str, Any]:
    return {"why": failed.why, "lost": [*failed.lost], "here": failed.here}


def _filled(word: str, values: Mapping[str, object]) -> str:
    return re.sub(r"%\{(\w+)\}", lambda found: str(values[found[1]]), word)
