"""Reads the results that the nodes and workers of a checkup wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from trnslurm.contract.files import read_json
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import cleaned
from trnslurm.records.run import NodeFitness, RunDir

_MOST_NAMED = 6


class Found(Frozen):
    """The results that nodes and workers wrote."""

    nodes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    preflight: Sequence[NodeFitness] = ()

    def host(self, node: int) -> str:
        """Return a node's name."""
        return str(self.nodes.get(node, {}).get("host") or f"node {node}")

    def hosts(self, nodes: Sequence[int]) -> str:
        """Return the names of the first few of these nodes."""
        return ", ".join(map(self.host, nodes[:_MOST_NAMED]))

    def of_nodes(self, read: Callable[[Any], Any]) -> dict[int, Any]:
        """Return a value for each node; skip nodes where the value is missing or damaged."""
        values = {}
        for node, seen in self.nodes.items():
            try:
                values[node] = read(seen)
            except (LookupError, TypeError, ValueError):
                continue
        return values

    def by_value(self, values: Mapping[int, str]) -> str:
        """Return values with the nodes that have them, such as `8 (4 nodes), 7 (node-3)`."""
        nodes: dict[str, list[int]] = {}
        for node, value in values.items():
            nodes.setdefault(value, []).append(node)
        if len(nodes) == 1 and len(values) == len(self.nodes):
            return next(iter(nodes))
        parts = []
        for value, which in sorted(nodes.items(), key=lambda item: -len(item[1])):
            more = len(which) - _MOST_NAMED
            also = f" and {more} more" if more > 0 else ""
            parts.append(f"{value} ({self.hosts(which)}{also})")
        return ", ".join(parts)

    def of_workers(self, name: str) -> dict[int, Any]:
        """Return a value for each worker that wrote it."""
        return {rank: seen[name] for rank, seen in self.workers.items() if name in seen}

    @property
    def stand_ins(self) -> str:
        """The devices that stand in for the job's device; empty if there are none."""
        names = {str(seen) for seen in self.of_workers("stand_in").values() if seen}
        return f" (on {', '.join(sorted(names))}, a stand-in)" if names else ""


def read_found(run: RunDir, nodes: int, workers: int) -> Found:
    """Return the results in a run directory; a damaged file counts as missing."""

    def read(what: str, count: int) -> dict[int, dict[str, Any]]:
        files = {n: read_json(run.checkup_file(what, n)) for n in range(count)}
        return {n: cleaned(found) for n, found in files.items() if found}

    return Found(
        nodes=read("node", nodes),
        workers=read("rank", workers),
        preflight=run.preflight("train", 1),
    )
