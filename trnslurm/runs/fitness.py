"""What the preflight of an attempt wrote down of each node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class NodeFitness:
    """One node: what is wrong with it, and what was seen."""

    host: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    clock_s: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all nodes: versions, code and plan."""


def read_preflight(state: Path, phase: str, attempt: int) -> list[NodeFitness]:
    """Return what was found, by rank; nothing if there was no preflight.

    Where node 0 could not say it, what the others wrote down themselves.
    """
    name = f"preflight-{phase}-{attempt}"
    files = [state / f"{name}.json"]
    if not files[0].exists():
        files = sorted(state.glob(f"{name}-node*.json"))
    found: list[NodeFitness] = []
    for file in files:
        try:
            nodes = json.loads(file.read_text(encoding="utf-8"))["nodes"]
            found += [_fitness(node) for node in nodes]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not for us to read, or not ours
    return found


def _fitness(node: Mapping[str, object]) -> NodeFitness:
    known = {k: v for k, v in node.items() if k in NodeFitness.__dataclass_fields__}
    for key in ("problems", "warnings"):
        known[key] = tuple(known.get(key, ()))  # type: ignore[arg-type]
    return NodeFitness(**known)  # type: ignore[arg-type]
