"""The servers of a job's roles as a state machine: events in, decisions out.

It does no I/O, and gets the time from its caller.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Union

from trnslurm.contract.roles import Role, Stand

TAKEN = 98
"""The exit code of a server whose port is in use: Linux's EADDRINUSE."""
MOST_FAILURES = 5
"""How many times in a row a server may end before its role has failed."""
STEADY_S = 60.0
"""A server that ends after this time does not count as failing in a row."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_LOOK_S = {Stand.STARTING: 0.5, Stand.READY: 5.0, Stand.UNWELL: 1.0}
_GRACE_S = 20.0
"""How long a server may take to end before it is killed."""
_LOST_S = 10.0
"""How long a node, like its server, must be silent to count as lost."""
_MOST_PORTS = 50
_RUNNING = (Stand.STARTING, Stand.READY, Stand.UNWELL, Stand.ENDING)
_ANEW = "it restarts together with training"


def _exit_words(code: int) -> str:
    """Return how a server ended, from a shell's exit code."""
    with suppress(ValueError):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


@dataclass
class Server:
    """A role's server, and its state."""

    role: Role
    number: int
    host: str
    stand: Stand = Stand.WAITING
    since: float = 0.0
    """When it entered this state."""
    starts: int = 0
    failures: int = 0
    """How many times in a row it has ended."""
    ports: int = 0
    """How many ports were already taken."""
    why: str = ""
    """Why it ended or is not responding."""
    silent_at: float = math.inf
    """Since when its node has not responded either."""
    looks: bool = False
    """Whether a check of the server is in progress."""
    look_at: float = math.inf
    act_at: float = math.inf
    """When a time limit or a pause is over."""

    @property
    def key(self) -> tuple[str, int]:
        return self.role.name, self.number

    @property
    def title(self) -> str:
        return f"{self.role.name} {self.number} on {self.host}"

    @property
    def runs(self) -> bool:
        return self.stand in _RUNNING


# -- decisions


@dataclass(frozen=True)
class Start:
    """Start a server."""

    server: Server


@dataclass(frozen=True)
class Look:
    """Check whether a server is ready: `looked`."""

    server: Server
    start: int
    """The number of the server's start."""


@dataclass(frozen=True)
class Signal:
    """Ask a server to end, or kill it: `ended`."""

    server: Server
    signum: int


@dataclass(frozen=True)
class Ready:
    """All servers are ready."""


@dataclass(frozen=True)
class Failed:
    """Training must end: a server is gone for good, or has moved to another node."""

    server: Server
    why: str
    lost: tuple[str, ...] = ()
    """Nodes that do not respond."""
    here: bool = True
    """Whether the job still has the nodes that its roles need."""


@dataclass(frozen=True)
class Over:
    """All servers have ended, and so may the program."""


Decision = Union[Start, Look, Signal, Ready, Failed, Over]


@dataclass
class Machine:
    """All servers for a job."""

    roles: Sequence[Role]
    hosts: Mapping[str, Sequence[str]]
    """The nodes of each role, spares last."""
    now: float = 0.0
    servers: list[Server] = field(default_factory=list)
    waits: bool = True
    """Whether training is waiting until all servers are ready."""
    _spares: dict[str, list[str]] = field(default_factory=dict)
    _out: list[Decision] = field(default_factory=list)
    _failed: bool = False
    """Whether training was told to end."""
    _held: bool = False
    """Whether servers are no longer restarted, because the job is being ended."""
    finishes: bool = False
    """Whether all servers were ordered to end."""
    _ends_at: float = math.inf

    def __post_init__(self) -> None:
        for role in self.roles:
            hosts = self.hosts[role.name]
            self._spares[role.name] = [*hosts[role.nodes :]]
            self.servers += [Server(role, n, host) for n, host in enumerate(hosts[: role.nodes])]

    # -- from outside

    def begin(self, now: float) -> list[Decision]:
        """Start the servers that do not depend on others."""
        return self._on(now, self._go_on)

    def ended(
        self, server: Server, now: float, code: int, why: str, *, lost: bool
    ) -> list[Decision]:
        """Process the end of a server; `lost` means that its node does not respond."""
        return self._on(now, lambda: self._ended(server, code, why, lost=lost))

    def looked(
        self, look: Look, now: float, why_not: str, *, silent: bool = False
    ) -> list[Decision]:
        """Process the result of a check; `why_not` is empty if the server is ready.

        `silent` means that its node does not respond either.
        """
        if look.start != look.server.starts:  # of the previous start
            return []
        return self._on(now, lambda: self._looked(look.server, why_not, silent=silent))

    def tick(self, now: float) -> list[Decision]:
        """Do everything that is due."""
        return self._on(now, self._tick)

    def again(self, now: float) -> list[Decision]:
        """Prepare for another attempt, which waits until all servers are ready."""
        return self._on(now, self._again)

    def hold(self, now: float) -> list[Decision]:
        """Restart no more servers, because the job is being ended."""
        self._held = True
        return self._on(now, lambda: None)

    def finish(self, now: float, within_s: float) -> list[Decision]:
        """End all servers in reverse order of their start."""
        self.finishes, self._ends_at = True, now + within_s
        return self._on(now, self._finish)

    @property
    def wakes_at(self) -> float:
        """When the machine wants a tick, or infinity for never."""
        times = [min(s.act_at, math.inf if s.looks else s.look_at) for s in self.servers]
        return min([*times, self._ends_at])

    # -- inside

    def _on(self, now: float, do: Callable[[], object]) -> list[Decision]:
        self.now = now
        do()
        out, self._out = self._out, []
        return out

    def _of(self, names: Iterable[str]) -> list[Server]:
        return [server for server in self.servers if server.role.name in names]

    def _become(self, server: Server, stand: Stand) -> None:
        server.stand, server.since = stand, self.now
        server.look_at = self.now + _LOOK_S.get(stand, math.inf)
        server.act_at = math.inf

    def _go_on(self) -> None:
        """Start each role that waits for no other role, and report when all are ready."""
        for server in self._of(self._names()):
            needed = self._of(server.role.needs)
            if server.stand is Stand.WAITING and all(s.stand is Stand.READY for s in needed):
                self._start(server)
        if self.waits and all(server.stand is Stand.READY for server in self.servers):
            self.waits = False
            self._out.append(Ready())

    def _names(self) -> tuple[str, ...]:
        return () if self._held or self.finishes else tuple(role.name for role in self.roles)

    def _start(self, server: Server) -> None:
        server.starts, server.looks = server.starts + 1, False
        self._become(server, Stand.STARTING)
        server.act_at = self.now + server.role.ready_s
        self._out.append(Start(server))
        if not server.role.ready:
            self._ready(server)

    def _ready(self, server: Server) -> None:
        if server.stand is not Stand.READY:
            self._become(server, Stand.READY)
            server.why = ""
        server.look_at = self.now + _LOOK_S[Stand.READY] if server.role.ready else math.inf
        self._go_on()

    def _looked(self, server: Server, why_not: str, *, silent: bool) -> None:
        server.looks = False
        if server.stand not in _LOOK_S:
            return
        server.silent_at = min(server.silent_at, self.now) if silent else math.inf
        if not why_not:
            self._ready(server)
            return
        if self.now >= server.silent_at + _LOST_S:
            self._become(server, Stand.ENDING)
            self._out.append(Signal(server, signal.SIGKILL))  # srun may wait for SlurmdTimeout
            return
        server.why = why_not
        if server.stand is Stand.READY:
            self._become(server, Stand.UNWELL)
            server.act_at = self.now + server.role.ready_s
        server.look_at = self.now + _LOOK_S[server.stand]

    def _tick(self) -> None:
        if self.now >= self._ends_at:
            self._ends_at = math.inf
            for server in self.servers:
                if server.runs:
                    self._out.append(Signal(server, signal.SIGKILL))
        for server in self.servers:
            if self.now >= server.act_at:
                self._limit_over(server)
            elif self.now >= server.look_at and not server.looks:
                server.looks = True
                self._out.append(Look(server, server.starts))

    def _limit_over(self, server: Server) -> None:
        if server.stand is Stand.PAUSING:
            server.stand, server.act_at = Stand.WAITING, math.inf
            self._go_on()
        elif server.stand is Stand.ENDING:
            server.act_at = math.inf
            self._out.append(Signal(server, signal.SIGKILL))
        else:
            what = "not ready" if server.stand is Stand.STARTING else "no response"
            server.why = f"{what} for {server.role.ready_s:g} s: {server.why or 'not checked yet'}"
            self._end(server)

    def _end(self, server: Server) -> None:
        self._become(server, Stand.ENDING)
        server.act_at = self.now + _GRACE_S
        self._out.append(Signal(server, signal.SIGTERM))

    def _ended(self, server: Server, code: int, why: str, *, lost: bool) -> None:
        lost = lost or self.now >= server.silent_at + _LOST_S
        server.silent_at = math.inf
        asked = server.why if server.stand is Stand.ENDING else ""
        was_steady = server.stand is Stand.READY and self.now - server.since >= STEADY_S
        self._become(server, Stand.DOWN)
        if self.finishes:
            self._finish()
            return
        if self._held:
            return
        if code == TAKEN and server.ports < _MOST_PORTS and self.waits:
            server.ports += 1
            self._start(server)
            return
        server.why = asked or why or _exit_words(code)
        if lost:
            self._lost(server)
        elif asked == _ANEW:
            server.stand, server.why = Stand.WAITING, ""
            self._go_on()
        elif server.role.restart == "all":
            self._fail(server, f"{server.title}: {server.why}")
        else:
            server.failures = 1 if was_steady else server.failures + 1
            if server.failures >= MOST_FAILURES:
                times = f"ended {server.failures} times in a row"
                self._fail(server, f"{server.title} {times}: {server.why}")
            else:
                self._become(server, Stand.PAUSING)
                pause_s = _FIRST_PAUSE_S * 2 ** (server.failures - 1)
                server.act_at = self.now + min(pause_s, _MOST_PAUSE_S)

    def _lost(self, server: Server) -> None:
        gone, spares = server.host, self._spares[server.role.name]
        why = f"{gone}, the node of {server.role.name} {server.number}, is lost"
        if not spares:
            self._fail(server, f"{why}, and no spare is left", gone, here=False)
            return
        server.host, server.ports, server.stand = spares.pop(0), 0, Stand.WAITING
        if not self.waits:  # the training knows the old address
            self._fail(server, why, gone)
        self._go_on()

    def _fail(self, server: Server, why: str, *lost: str, here: bool = True) -> None:
        if not self._failed:
            self._failed = True
            self._out.append(Failed(server, why, lost, here))

    def _again(self) -> None:
        self.waits, self._failed = True, False
        for server in self.servers:
            if server.stand is Stand.DOWN:
                server.stand, server.failures = Stand.WAITING, 0
                server.ports += 1
            elif server.role.restart == "all" and server.runs:
                server.why = _ANEW
                self._end(server)
        self._go_on()

    def _finish(self) -> None:
        """End the servers of one role after another, in reverse order."""
        for server in self.servers:
            if not server.runs:
                server.stand, server.act_at = Stand.DOWN, math.inf
        for role in reversed(self.roles):
            running = [server for server in self._of([role.name]) if server.runs]
            for server in running:
                if server.stand is not Stand.ENDING:
                    self._end(server)
            if running:
                return
        self._ends_at = math.inf
        self._out.append(Over())
