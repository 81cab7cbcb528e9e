"""Starts a node's workers, and reports which of them failed.

    python -m trnslurm.node.launcher --workers=32 -- train.py …

It does what torchrun does in a job, without the seconds that torchrun needs to import PyTorch. The
arguments after `--` are Python's, so a module is `-m NAME`; with --program they are a complete
command. With --once the command starts only once, on the first node. The nodes meet on the master
port, and start together. Then the port is free again, and worker 0 runs the store there in which
the workers meet. Until the end, the first node stays connected to the others, so that all nodes
leave together, and worker 0 leaves after all other workers (sitecustomize.py).

Workers get the variables that torchrun gives them. If one fails, the others are ended as torchrun
does it (2.9): torch/distributed/elastic/agent/server/local_elastic_agent.py, and
multiprocessing/api.py next to agent/.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trnslurm.contract.times import utc_time
from trnslurm.contract.variables import Variable
from trnslurm.node import once, processes, ray
from trnslurm.node.killed import ended_by_kernel, tell_of_kill
from trnslurm.node.meeting import (
    MESSAGE_S,
    Connection,
    Meeting,
    MeetingError,
    Rendezvous,
    join,
    read_rendezvous,
)
from trnslurm.node.stacks import main_frames, place_of, stacks_of, waits_in

MEET_S = 600.0
"""How long the nodes wait for each other, as with torchrun (static_tcp_rendezvous.py)."""
_STARTUP = str(Path(__file__).with_name("startup"))
_FAILED = 1
_LOOK_S = 1.0
_WHERE_S = 2.0
_OF_TIMEOUTS = (1, -signal.SIGABRT)
"""The exit codes of an exception and of NCCL's abort, with which a wait for others may end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's workers; return 0 if all workers of the job have succeeded."""
    parser = argparse.ArgumentParser(prog="launcher", allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=1, help="on each node")
    parser.add_argument("--once", action="store_true", help="start only on the first node")
    ray.add_options(parser)
    once.add_options(parser)
    parser.add_argument("--program", action="store_true", help="run a command, not Python")
    parser.add_argument(
        "--fill-local-rank", action="store_true", help="replace {local_rank} in the arguments"
    )
    parser.add_argument("words", nargs="+", metavar="WORD", help="Python script, or -m MODULE")
    options = parser.parse_args(argv)
    command = [*([] if options.program else [sys.executable, "-u"]), *options.words]
    try:
        place = read_rendezvous("launch")
        nodes = Nodes(place, ray.new_cluster() if options.ray and not place.node else None)
        nodes.meet()
    except MeetingError as error:
        processes.say(f"error: the workers cannot start: {error}")
        return _FAILED
    if options.ray:
        return ray.OnRay(nodes, command, options).run()
    if options.once:
        return once.Once(nodes, command, options).run()
    with tempfile.TemporaryDirectory(prefix="trnslurm-errors-") as errors:
        fills = options.fill_local_rank
        return Launcher(nodes, options.workers, command, Path(errors), fills=fills).run()


class Nodes:
    """The other nodes' launchers: the first node has all of them, and the others only the first."""

    def __init__(self, rendezvous: Rendezvous, tells: Mapping[str, str] | None = None) -> None:
        """Store the meeting place, and what the first node tells all others there."""
        self._rendezvous = rendezvous
        self.told: Mapping[str, str] = tells or {}
        self.number, self.count = rendezvous.node, len(rendezvous.hosts)
        self._poll = select.epoll()  # select takes no descriptor above 1023
        self._connections: dict[int, Connection] = {}
        self._joined = ExitStack()
        self._port = socket.socket()
        self._waits_for: set[int] = set()
        """On the first node, the nodes whose workers run, as far as it knows. On other nodes, the
        first node."""
        self.any_lost = False
        """Whether a node left without reporting that its workers were done: one failed there."""

    def fileno(self) -> int:
        return self._poll.fileno()

    def meet(self) -> None:
        """Wait until all nodes have joined; raise a MeetingError if that takes too long."""
        if self.number == 0:
            self._gather()
        else:
            connection = self._joined.enter_context(join(self._rendezvous, MEET_S))
            with suppress(OSError, ValueError):
                self.told = connection.receive(MEET_S).get("told", {})
                self._connections[0] = connection
            if not self._connections:
                raise MeetingError("not all nodes joined: the log of node 0 says which")
        for node, connection in self._connections.items():
            connection.keep_alive()
            self._poll.register(connection.fileno(), select.EPOLLIN)
            self._waits_for.add(node)

    def _gather(self) -> None:
        deadline = time.monotonic() + MEET_S
        meeting = Meeting(self._rendezvous, lambda connection, _: connection)
        try:
            meeting.open(deadline)
            meeting.wait(deadline)
        finally:
            meeting.close()
        # The socket does not listen, and keeps the port for worker 0: another job's programs are
        # not given it, and a store may listen beside it, as both have SO_REUSEADDR (ip(7)).
        with suppress(OSError):
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("", self._rendezvous.port))
        hosts = dict(enumerate(self._rendezvous.hosts))
        missing = [f"node {n} ({hosts[n]})" for n in hosts if n and n not in meeting.heard]
        if missing:
            joined = f"{len(hosts) - len(missing)}/{len(hosts)} nodes joined"
            raise MeetingError(
                f"after {MEET_S:.0f} s, only {joined}; missing: {', '.join(missing)}"
            )
        self._connections = dict(meeting.heard)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send({"go": True, "told": self.told})

    @property
    def others_ended(self) -> bool:
        """Whether this is the first node and no other node has running workers."""
        return self.number == 0 and not self._waits_for

    def read(self) -> None:
        """Read what has arrived: a node's workers have ended, or this node may leave."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        for node, connection in self._connections.items():
            if connection.fileno() in ready:
                try:
                    connection.receive(MESSAGE_S)
                except (OSError, ValueError):
                    self.any_lost = True
                self._poll.unregister(connection.fileno())
                self._waits_for.discard(node)

    def leave(self, broken: Callable[[], bool] | None = None) -> bool:
        """Report that this node's workers have ended, and wait for the workers of all other nodes.

        Return False if `broken`, which is called regularly, returns True first.
        """
        if self.number:
            self._tell_all()
        while self._waits_for:
            select.select([self._poll], [], [], _LOOK_S if broken else None)
            self.read()
            if broken and broken():
                return False
        if self.number == 0:
            self._tell_all()
            for connection in self._connections.values():  # which leave first, for the port's sake
                connection.await_end(MESSAGE_S)
        self._joined.close()
        return True

    def _tell_all(self) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send({"ended": True})


class Ended(NamedTuple):
    """A worker that has ended."""

    local_rank: int
    pid: int
    code: int
    """The exit code, or minus the signal that ended it."""
    error: str
    """What it has written to TORCHELASTIC_ERROR_FILE."""


class Launcher:
    """The workers of this node."""

    def __init__(
        self,
        nodes: Nodes,
        workers: int,
        command: Sequence[str],
        errors: Path,
        *,
        fills: bool = False,
    ) -> None:
        self._nodes, self._workers, self._errors = nodes, workers, errors
        self._command, self._fills = [*command], fills
        self._signals = processes.SignalQueue()
        self._running: dict[int, int] = {}
        """The local rank of each running worker, by pid."""
        self._holds_worker_0: int | None = None
        """The file descriptor whose end of file lets worker 0 end."""
        self._deadline: float | None = None
        """When workers are killed that were ordered to end."""
        self._failed = False
        self._done: dict[int, float] = {}
        """The end times of the workers that did not fail, by local rank."""

    def run(self) -> int:
        """Start the workers, and wait for their end; return the exit code."""
        before = ended_by_kernel()
        self._start()
        failures: list[Ended] = []
        while self._running:
            failures += self._watch()
        if failures:
            first = self._nodes.number * self._workers
            tell_of_kill({first + f.local_rank: f.code for f in failures}, before)
        return _FAILED if self._failed else self._leave()

    def _start(self) -> None:
        """Start the workers, each in its own session, as torchrun does."""
        for local_rank in range(self._workers):
            environ = os.environ | self._variables(local_rank)
            if environ["RANK"] == "0" and environ["WORLD_SIZE"] != "1":
                self._start_first(environ)
            else:
                command = self._words(local_rank)
                self._running[processes.spawn(command, environ=environ)] = local_rank

    def _words(self, local_rank: int) -> list[str]:
        """Return a worker's command."""
        if not self._fills:
            return self._command
        return [word.replace("{local_rank}", str(local_rank)) for word in self._command]

    def _start_first(self, environ: Mapping[str, str]) -> None:
        given, self._holds_worker_0 = os.pipe()
        os.set_inheritable(given, True)
        path = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        if _STARTUP not in path:
            path.insert(0, _STARTUP)
        own = {Variable.OTHERS: str(given), "PYTHONPATH": os.pathsep.join(path)}
        self._running[processes.spawn(self._words(0), environ={**environ, **own})] = 0
        os.close(given)

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return torchrun's variables (LocalElasticAgent._start_workers, run.config_from_args)."""
        workers, node, nodes = self._workers, self._nodes.number, self._nodes.count
        rank, world = str(node * workers + local_rank), str(nodes * workers)
        found = {
            "LOCAL_RANK": str(local_rank), "RANK": rank, "GROUP_RANK": str(node),
            "ROLE_RANK": rank, "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(workers), "WORLD_SIZE": world,
            "GROUP_WORLD_SIZE": str(nodes), "ROLE_WORLD_SIZE": world,
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            # Neuron's plugin and others use it to see that workers are started from outside.
            "TORCHELASTIC_RUN_ID": "none",
            # Worker 0 keeps the store (torch/distributed/rendezvous.py, torch_xla likewise).
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(local_rank)),
        }  # fmt: skip
        defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONFAULTHANDLER": "1"}
        if workers > 1:
            defaults["OMP_NUM_THREADS"] = "1"
        return found | {k: v for k, v in defaults.items() if k not in os.environ}

    def _watch(self) -> list[Ended]:
        """Wait until something happens, and act on it; return the workers that have failed."""
        within_s = self._deadline and max(0.0, self._deadline - time.monotonic())
        also = [] if self._failed else [self._nodes.fileno()]
        arrived, heard = self._signals.wait(within_s, also)
        if heard:
            self._nodes.read()
        failed = [failure for failure in self._reap() if failure.code and not self._failed]
        if failed:
            processes.say("\n".join(map(self._told, failed)))
            if any(failure.code in _OF_TIMEOUTS for failure in failed):
                self._tell_where()
            self._end(signal.SIGTERM)
        elif (ending := arrived & processes.END_SIGNALS) and not self._failed:
            number = signal.Signals(min(ending))
            if self._running:
                processes.say(f"trnslurm: the launcher got signal: {number.value} ({number.name})")
            self._end(number)
        if self._deadline and time.monotonic() >= self._deadline:
            self._signal(signal.SIGKILL)
            self._deadline = None
        self._release_worker_0()
        return failed

    def _reap(self) -> list[Ended]:
        """Return the workers that have ended, including those that did not fail."""
        found = []
        for pid, local_rank in [*self._running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                found.append(Ended(local_rank, pid, code, self._error_of(local_rank)))
                if not code:
                    self._done[local_rank] = time.time()
        return found

    def _tell_of_done(self) -> None:
        """Report which workers had ended when others failed, perhaps while waiting for them."""
        for local_rank, when in sorted(self._done.items()):
            who = self._name(local_rank, when)
            processes.say(f"trnslurm: {who} ended with exit code 0 while others ran")

    def _tell_where(self) -> None:
        """Report where the other workers are, for which the one that failed may have waited."""
        until = time.monotonic() + _WHERE_S
        for pid, local_rank in self._running.items():
            text = stacks_of(pid, until=0) if time.monotonic() < until else ""
            if frames := main_frames(text):
                who = self._name(local_rank, time.time())
                does = "waits" if waits_in(frames) else "is"
                processes.say(f"trnslurm: {who} {does} at {place_of(frames)}")

    def _end(self, signum: signal.Signals) -> None:
        self._tell_of_done()
        self._failed, self._deadline = True, time.monotonic() + processes.KILL_WAIT_S
        self._signal(signum)

    def _signal(self, signum: signal.Signals) -> None:
        for pid in self._running:
            processes.send(pid, signum)

    def _release_worker_0(self) -> None:
        alone = self._nodes.others_ended and not any(self._running.values())
        if self._holds_worker_0 is not None and (alone or self._failed):
            os.close(self._holds_worker_0)
            self._holds_worker_0 = None

    def _leave(self) -> int:
        """Leave together with the other nodes; return the exit code."""
        for signum in processes.heard_end_signals():
            signal.signal(signum, _fail)
        if self._signals.wait(0)[0] & processes.END_SIGNALS:
            self._tell_of_done()
            return _FAILED
        try:
            self._nodes.leave()
        except SystemExit:
            self._tell_of_done()
            raise
        if self._nodes.any_lost:
            self._tell_of_done()
        return 0

    def _told(self, failure: Ended) -> str:
        """Return the lines that report a failed worker; triage/words.py reads them."""
        code = failure.code
        what = f"exit code {code} of PID {failure.pid}"
        if code < 0:
            what = f"Signal {-code} ({_name_of(-code)}) received by PID {failure.pid}"
        head = f"{self._name(failure.local_rank, time.time())} failed: {what}"
        if failure.error:
            head += "; it recorded:"
        return "\n  ".join([f"trnslurm: {head}", *failure.error.splitlines()])

    def _name(self, local_rank: int, when: float) -> str:
        """Return the time of an event, and the name of its worker."""
        time_text = f"{utc_time(when)[:-1]}.{int(when % 1 * 1000):03}Z"
        rank = self._nodes.number * self._workers + local_rank
        return f"{time_text} rank {rank} (local rank {local_rank}, {os.uname().nodename})"

    def _error_file(self, local_rank: int) -> Path:
        return self._errors / f"{local_rank}.json"

    def _error_of(self, local_rank: int) -> str:
        """Return the error that a function with @record has written (errors/error_handler.py)."""
        try:
            message: Any = json.loads(self._error_file(local_rank).read_bytes())["message"]
            stack = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
            return str(stack)
        except (OSError, ValueError, LookupError, TypeError):
            return ""


def _name_of(signum: int) -> str:
    return signal.Signals(signum).name if signum in [*signal.Signals] else "?"


def _fail(*_: object) -> NoReturn:
    sys.exit(_FAILED)


if __name__ == "__main__":
    sys.exit(main())
