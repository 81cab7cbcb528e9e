"""Compares the nodes' reports: which nodes are unfit, and which of them a job should avoid."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

MAX_SKEW_S = 5.0
# If all nodes have one of these problems, the site is to blame, otherwise the node.
_SHARED = ("run directory", "cache", "dataset")
_OF_CHANCE = ("master port",)
_LAST_CHARACTERS = 12


@dataclass
class NodeReport:
    """A node's report, and the problems that the comparison adds."""

    node: int
    host: str
    heard: bool = True
    seconds: float = 0.0
    clock_s: float = 0.0
    """How far its clock is ahead of node 0's."""
    facts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """The problem and its fix, by check."""
    warnings: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    """The facts that must be the same on all nodes."""

    def record(self) -> dict[str, Any]:
        """Return the node's entry in the verdict file."""
        return {
            "node": self.node,
            "host": self.host,
            "ok": not self.problems,
            "problems": list(self.problems.values()),
            "warnings": self.warnings,
            "seconds": self.seconds,
            "clock_s": round(self.clock_s, 3),
            "facts": self.facts,
            "same": self.same,
        }


def judge(nodes: Sequence[NodeReport], silent: Mapping[int, str], waited_s: float) -> list[str]:
    """Add the problems that the comparison shows; return the hosts that are to blame.

    `silent` contains the reasons of nodes that could not report, but could write a file.
    """
    heard = [node for node in nodes if node.heard]
    compare_clocks(heard)
    compare_versions(heard)
    blame_first = miss(nodes, silent, waited_s)
    failed = Counter(check for node in heard for check in node.problems)
    bad = [node.host for node in nodes if is_to_blame(node, failed, len(heard))]
    if blame_first:
        return [nodes[0].host]
    return bad


def miss(nodes: Sequence[NodeReport], silent: Mapping[int, str], waited_s: float) -> bool:
    """Add a problem to nodes that did not report; return whether node 0 is the cause."""
    missing = [node for node in nodes if not node.heard]
    for node in missing:
        text = f"did not report within {waited_s:g} s"
        what_to_do = "check that it is up, and check its network and file systems"
        node.problems["report"] = f"{silent.get(node.node, text)}; {what_to_do}"
    none_came = len(missing) == len(nodes) - 1 and len(missing) > 1
    if none_came:
        nodes[0].problems["report"] = "no other node can reach it; check its network and firewall"
    return none_came


def compare_clocks(heard: Sequence[NodeReport]) -> None:
    """Add a problem to nodes whose clocks are off; if there are only two nodes, to the second."""
    usual = median(node.clock_s for node in heard) if len(heard) > 2 else 0.0
    for node in heard:
        ahead = node.clock_s - usual
        if abs(ahead) > MAX_SKEW_S:
            word = "ahead of" if ahead > 0 else "behind"
            other = "the other nodes'" if len(heard) > 2 else f"{heard[0].host}'s"
            text = f"its clock is {abs(ahead):.1f} s {word} {other}"
            node.problems["clock"] = f"{text}; run chrony (chronyc makestep)"


def compare_versions(heard: Sequence[NodeReport]) -> None:
    """Add a problem to nodes whose software differs from most, or in a tie from node 0's."""
    for name in dict.fromkeys(name for node in heard for name in node.same):
        values = Counter(node.same.get(name, "missing") for node in heard)
        most = max(values.values())
        first = heard[0].same.get(name, "missing")
        usual = first if values[first] == most else values.most_common(1)[0][0]
        for node in heard:
            if (own := node.same.get(name, "missing")) != usual:
                where = heard[0].host if len(heard) == 2 else "most nodes"
                text = f"{name} is {_short(own)}, but on {where} {_short(usual)}"
                fix = "use one Python and one run directory for all nodes, on a shared file system"
                node.problems.setdefault("same", f"{text}; {fix}")


def is_to_blame(node: NodeReport, failed: Mapping[str, int], heard: int) -> bool:
    """Check whether the job should avoid this node.

    `failed` counts, by check, the nodes that reported a problem. `heard` counts all nodes that
    reported.
    """
    others = heard - node.heard
    for check in node.problems:
        if check in _OF_CHANCE:
            continue
        if failed.get(check, 0) - node.heard < others:  # some other node passes it
            return True
        if not others and check not in _SHARED:
            return True
    return False


def _short(value: str) -> str:
    """Return a version in full, or the start of a checksum."""
    return value if len(value) < 4 * _LAST_CHARACTERS else value[:_LAST_CHARACTERS]
