"""Chooses the nodes that a training job avoids for a while, after the preflight or a watchdog.

state/excluded.json lists these nodes, until when they are left out, and why. Slurm stores a job's
list of excluded nodes with the job. The batch script replaces that list only when it requeues the
job, so a job that is already waiting does not get a node back whose time is up.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trnslurm.contract.files import read_json, write_json
from trnslurm.node.state import RUN

_NAMED = 3
"""Up to this many nodes are named in the reason of a failure."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Change:
    """The bad nodes before an attempt and after it."""

    before: frozenset[str]
    after: frozenset[str]

    def applied_to(self, excluded: Iterable[str]) -> str | None:
        """Return the nodes to leave out, including the user's choice, or None for no change."""
        wanted = set(excluded) - self.before | self.after
        return None if wanted == set(excluded) else ",".join(sorted(wanted))


def update(
    bad: Mapping[str, str],
    hosts: Sequence[str],
    *,
    hours: float,
    now: float,
    most: int = sys.maxsize,
    booted: Mapping[str, float] = MappingProxyType({}),
) -> Change:
    """Record the bad nodes among an attempt's nodes, with reasons; return the change.

    A node that has booted since it was found bad is no longer left out, because HyperPod and
    ParallelCluster replace an instance under the same name. `most` is how many nodes the job can do
    without: the nodes that were left out longest are used again. With too few nodes left, Slurm
    would never start the job (BadConstraints).
    """
    if hours <= 0 or (len(hosts) > 1 and len(bad) == len(hosts)):
        bad = {}  # a problem that all nodes have is not their fault
    before = read_excluded()
    after = {
        host: entry
        for host, entry in before.items()
        if float(entry["until"]) > max(now, booted.get(host, -math.inf) + hours * 3600)
    }
    after |= {host: {"until": now + hours * 3600, "why": why} for host, why in bad.items()}
    newest = sorted(after, key=lambda host: -float(after[host]["until"]))[:most]
    after = {host: entry for host, entry in after.items() if host in newest}
    if after != before:
        write_json(RUN.excluded_file, {"nodes": after})
    return Change(frozenset(before), frozenset(after))


def trouble(attempt: int, hosts: Sequence[str]) -> str:
    """Return the problem that a preflight or a watchdog found, in one line, or ""."""
    bad = bad_nodes(attempt, hosts)
    words = [why if host in why else f"{host}: {why}" for host, why in bad.items()]
    if len(words) > _NAMED:
        words[_NAMED:] = [f"and {len(words) - _NAMED} more"]
    stuck = str(read_json(RUN.stuck_file("train", attempt)).get("line", ""))
    return "; ".join(words) or unfit(attempt) or stuck


def bad_nodes(attempt: int, hosts: Sequence[str]) -> dict[str, str]:
    """Return an attempt's bad nodes by Slurm's names, with the reasons."""
    bad: dict[str, str] = {}
    for file in RUN.preflight_files("train", attempt):
        bad |= _preflight(read_json(file), hosts)
    if host := stuck_node(attempt, hosts):
        bad.setdefault(host, str(read_json(RUN.stuck_file("train", attempt)).get("line", "stuck")))
    return bad


def stuck_node(attempt: int, hosts: Sequence[str]) -> str:
    """Return the node that held up the others, by Slurm's name, or "" if there was none."""
    stuck = read_json(RUN.stuck_file("train", attempt))
    return _slurms_name(stuck, hosts) if stuck else ""


def slow_nodes(attempt: int, hosts: Sequence[str]) -> dict[str, str]:
    """Return the nodes whose workers computed for longer than the others, with the reasons."""
    notices = read_json(RUN.pace_file("train", attempt)).get("notices", ())
    slow = (told for told in notices if told.get("what") == "compute")
    return {host: str(told["text"]) for told in slow if (host := _slurms_name(told, hosts))}


def unfit(attempt: int) -> str:
    """Return the first problem that a preflight found, on any node, or "" if there was none."""
    for node in read_json(RUN.preflight_file("train", attempt)).get("nodes", ()):
        for problem in node.get("problems", ()):
            return f"{node.get('host', 'a node')}: preflight failed; {problem}"
    return ""


def _preflight(report: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, str]:
    named = set(report.get("bad", ()))
    found = {}
    for node in report.get("nodes", ()):
        if node.get("host") in named and (host := _slurms_name(node, hosts)):
            found[host] = "; ".join(["preflight failed", *node.get("problems", ())[:1]])
    return found


def _slurms_name(node: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Return a node's name in Slurm, which may differ from its host name."""
    number = node.get("node")
    if isinstance(number, int) and 0 <= number < len(hosts):
        return hosts[number]
    return str(node["host"]) if node.get("host") in hosts else ""


def read_excluded() -> dict[str, dict[str, Any]]:
    """Return the excluded nodes, with `until` and `why`."""
    nodes = read_json(RUN.excluded_file).get("nodes", {})
    return {host: entry for host, entry in nodes.items() if _HOST.fullmatch(host)}
