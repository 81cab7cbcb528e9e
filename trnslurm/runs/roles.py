"""Reports the state of the servers of a run's roles."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_json
from trnslurm.contract.roles import Role, Stand
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.records.run import RunDir
from trnslurm.runs.tables import count

_RECENT_S = 300.0
_STANDS = frozenset(map(str, Stand))


class Server(Frozen):
    """A server of a role, as recorded by the program that supervises it."""

    role: str
    number: int
    host: str
    address: str
    stand: str
    since: float
    """When its current state began, in seconds since the epoch."""
    starts: int
    """The number of times it was started in this job."""
    log: int
    """The number of its newest log, which counts the starts of its role."""
    why: str
    """Why it last ended, or why it does not answer."""

    def __str__(self) -> str:
        ago = f"{max(0.0, time.time() - self.since):.0f} s"
        why = f": {self.why}" if self.why else ""
        if self.stand == Stand.PAUSING:
            return f"{self.number} on {self.host} ended {ago} ago and will restart{why}"
        stand = "not responding" if self.stand == Stand.UNWELL else self.stand
        return f"{self.number} on {self.host} {stand} for {ago}{why}"


def servers_of(run: RunDir) -> list[Server]:
    """Return all servers of a run's roles, omitting entries with values of the wrong type."""
    found = []
    for role, told in read_json(run.servers_file).items():
        for number, each in enumerate(told if isinstance(told, list) else ()):
            try:
                server = Server(
                    role=role,
                    number=number,
                    since=float(each["since"]),
                    starts=int(each["starts"]),
                    log=int(each["log"]),
                    **{name: str(each[name]) for name in ("host", "address", "stand", "why")},
                )
            except (LookupError, TypeError, ValueError):
                continue
            found += [server] if server.stand in _STANDS else []
    return found


def roles_told(run: RunDir, attempts: Sequence[Attempt]) -> dict[str, str]:
    """Return the state of each role in words, while an attempt is running."""
    if not (attempts and attempts[-1].under_way):
        return {}
    roles: dict[str, list[Server]] = {}
    for server in servers_of(run):
        roles.setdefault(server.role, []).append(server)
    return {role: _words(servers) for role, servers in roles.items()}


def nodes_told(roles: Sequence[Role]) -> str:
    """Return, in words, the nodes that a job has for its roles."""
    told = ""
    for role in roles:
        told += f", {count(role.nodes, 'node')} of {role.name}"
        told += f" in partition {role.partition}" if role.partition else ""
        told += f" and {count(role.spares, 'spare')}" if role.spares else ""
    return told


def without_price(roles: Sequence[Role]) -> str:
    """Return, in words, which nodes a cost omits, because a profile has only one price."""
    names = ", ".join(dict.fromkeys(role.partition for role in roles if role.partition))
    return f" without the nodes of partition {names}, whose price is unknown" if names else ""


def _words(servers: Sequence[Server]) -> str:
    ready = [server for server in servers if server.stand == Stand.READY]
    hosts = f" ({brief([server.host for server in ready])})" if ready else ""
    told = [f"{len(ready)} of {count(len(servers), 'server')} ready{hosts}"]
    told += [str(server) for server in servers if server not in ready]
    for server in ready:
        if server.starts > 1 and time.time() - server.since < _RECENT_S:
            told.append(f"{server} after {count(server.starts, 'start')}")
    return "; ".join(told)
