"""Reads the resource use that a run's nodes have recorded, and finds nodes that slow the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from trnslurm.contract.files import last_line
from trnslurm.frozen import Frozen
from trnslurm.node.hosts import brief
from trnslurm.node.usage.read import Notice, newest_lines, notices
from trnslurm.records.foreign import cleaned, printable
from trnslurm.records.run import RunDir, is_number
from trnslurm.runs.roles import servers_of
from trnslurm.runs.status import RunStatus

# A node whose devices compute this much less than the others' has them wait.
_LESS = 0.2
_LEAST_NODES = 2
_STALE_S = 180.0
_LATEST = float(1 << 33)


class NodeUsage(Frozen):
    """A node's use in the last minute that it recorded. None means unknown."""

    node: int
    host: str
    at: float
    """When the minute ended."""
    kind: str
    """The kind of its devices: GPU, NeuronCore, or empty."""
    devices: float | None
    """The share of time in which the devices were computing, averaged over all devices."""
    device_memory_gib: float | None
    """The memory in use on the fullest device."""
    power_w: float | None
    cpu: float | None
    """The share of its processors' time that was used."""
    memory_left_gib: float | None
    memory_gib: float | None
    net_in_mb_s: float | None
    net_out_mb_s: float | None
    fabric_in_mb_s: float | None
    fabric_out_mb_s: float | None
    role: str = ""
    """The role of its server, whose number is `node`; empty for a node that trains."""

    @property
    def name(self) -> str:
        """Its number, preceded by the role of its server."""
        return f"{self.role} {self.node}".strip()


class Usage(Frozen):
    """The use of the nodes of a run's newest attempt, and the problems that they report."""

    nodes: tuple[NodeUsage, ...]
    """The training nodes, and then those of servers."""
    notices: tuple[Notice, ...]

    @property
    def training(self) -> list[NodeUsage]:
        """The training nodes."""
        return [node for node in self.nodes if not node.role]

    @property
    def now(self) -> bool:
        """Whether the nodes are still reporting."""
        newest = max((node.at for node in self.nodes), default=0.0)
        return time.time() - newest < _STALE_S

    def told(self) -> list[str]:
        """Return the problems, grouping nodes that report the same one."""
        hosts: dict[str, list[str]] = {}
        for notice in self.notices:
            hosts.setdefault(printable(notice.text), []).append(printable(notice.host))
        told = [f"{brief(names)}: {text}" for text, names in hosts.items()]
        return [*told, *self._holds_up()]

    def _holds_up(self) -> list[str]:
        """Return a line about each node whose GPUs compute much less than those of the other nodes.

        A GPU that waits for others in an NCCL collective counts as computing. A GPU that waits for
        its own host or its data does not.
        """
        known = [(n, n.devices) for n in self.training if n.kind == "GPU" and n.devices is not None]
        if len(known) < _LEAST_NODES or not self.now:
            return []
        usual = statistics.median_high([share for _, share in known])
        slow = [(n.host, share) for n, share in known if share < usual - _LESS]
        return [
            f"{host}: its GPUs compute {share:.0%} of the time, compared to {usual:.0%} on the "
            "other nodes. Its data loader or CPUs are slowing down the others"
            for host, share in slow
            if 2 * len(slow) < len(known) or len(known) == _LEAST_NODES
        ]

    def brief(self) -> str:
        """Return the values of the training nodes in one line; empty if there are none."""
        nodes, parts = self.training, []
        for name, values in (
            (
                f"{nodes[0].kind}s" if nodes else "",
                [n.devices for n in nodes],
            ),
            ("processors", [n.cpu for n in nodes]),
        ):
            if known := [value for value in values if value is not None]:
                low, high = min(known), max(known)
                span = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
                parts.append(f"{name} {span}")
        left = [n.memory_left_gib for n in nodes if n.memory_left_gib is not None]
        if left:
            parts.append(f"memory left {min(left):.0f} GiB")
        moved = [n.fabric_in_mb_s if n.fabric_in_mb_s else n.net_in_mb_s for n in nodes]
        if sent := [value for value in moved if value is not None]:
            parts.append(f"network {_rate(statistics.fmean(sent))} per node")
        return ", ".join(parts)

    def facts(self) -> dict[str, Any]:
        """Return all values for --json."""
        return {"nodes": [asdict(n) for n in self.nodes], "notices": self.told()}


def usage_of(run: RunDir, status: RunStatus) -> Usage:
    """Return what the nodes of the newest attempt have recorded."""
    phase = next((p for p in reversed(status.phases) if p.attempt), None)
    if phase is None:
        return Usage(nodes=(), notices=())
    which = phase.phase, phase.attempt
    lines = {node: cleaned(line) for node, line in newest_lines(run, *which).items()}
    nodes, told = [_node(number, line) for number, line in lines.items()], [*notices(run, *which)]
    for server in servers_of(run):
        line = cleaned(last_line(run.usage_file(server.number, server.role)))
        if line.get("host") == server.host:
            nodes.append(_node(server.number, line, server.role))
            told += notices(run, server.role, server.log)
    return Usage(nodes=tuple(nodes), notices=() if status.final else tuple(told))


def _node(number: int, line: dict[str, Any], role: str = "") -> NodeUsage:
    def figure(name: str) -> float | None:
        value: Any = line.get(name)
        return float(value) if is_number(value) else None

    def listed(name: str) -> list[float]:
        values = line.get(name)
        return [float(v) for v in values if is_number(v)] if isinstance(values, list) else []

    shares, watts = listed("device_use"), listed("device_power_w")
    return NodeUsage(
        node=number,
        role=role,
        host=printable(str(line.get("host", "?"))),
        at=min(max(0.0, figure("time") or 0.0), _LATEST),
        kind=printable(str(line.get("kind", ""))),
        devices=statistics.fmean(shares) if shares else None,
        device_memory_gib=max(listed("device_memory_gib"), default=None),
        power_w=sum(watts) if watts else None,
        **{
            name: figure(name)
            for name in (
                *("cpu", "memory_left_gib", "memory_gib", "net_in_mb_s", "net_out_mb_s"),
                *("fabric_in_mb_s", "fabric_out_mb_s"),
            )
        },
    )


def _rate(mb_s: float) -> str:
    return f"{mb_s / 1000:.1f} GB/s" if mb_s >= 1000 else f"{mb_s:.1f} MB/s"


def share(value: float | None) -> str:
    """Format a share for a table."""
    return "-" if value is None else f"{value:.0%}"


def rows_of(nodes: Sequence[NodeUsage]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a table of nodes, without columns empty for all nodes."""
    columns: dict[str, Callable[[NodeUsage], str]] = {
        "node": lambda n: n.name,
        "host": lambda n: n.host,
        "devices": lambda n: share(n.devices),
        "device GiB": lambda n: _plain(n.device_memory_gib, ".1f"),
        "watts": lambda n: _plain(n.power_w, ".0f"),
        "CPUs": lambda n: share(n.cpu),
        "GiB left": lambda n: _pair(n.memory_left_gib, n.memory_gib, ".0f"),
        "net in/out MB/s": lambda n: _pair(n.net_in_mb_s, n.net_out_mb_s, ".0f"),
        "fabric in/out": lambda n: _pair(n.fabric_in_mb_s, n.fabric_out_mb_s, ".0f"),
        "as of": lambda n: time.strftime("%H:%M", time.localtime(n.at)),
    }
    cells = {name: [cell(n) for n in nodes] for name, cell in columns.items()}
    kept = [name for name, values in cells.items() if any(value != "-" for value in values)]
    return kept, [[cells[name][row] for name in kept] for row in range(len(nodes))]


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(one: float | None, other: float | None, form: str) -> str:
    return "-" if one is None else f"{_plain(one, form)}/{_plain(other, form)}"
