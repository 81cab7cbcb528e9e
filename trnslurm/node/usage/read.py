"""Reads what a run's nodes have recorded about their usage. Other users may have written it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from trnslurm.contract.files import last_line, read_json
from trnslurm.contract.rundir import RunFiles


class Notice(NamedTuple):
    """What a user should know about a node."""

    text: str
    since: float
    until: float | None = None
    """None if it is still true."""
    host: str = ""


def notices(run: RunFiles, phase: str, attempt: int) -> Iterator[Notice]:
    """Yield the notices that are true now, by node, and those about the workers' pace."""
    files = [*run.notices_files(phase, attempt).values(), run.pace_file(phase, attempt)]
    for file in files:
        facts = read_json(file)
        listed = facts.get("notices")
        for notice in listed if isinstance(listed, list) else []:
            text, since, until = (_at(notice, name) for name in ("text", "since", "until"))
            host = _at(notice, "host") or facts.get("host")
            if until is None and isinstance(text, str) and isinstance(since, (int, float)):
                yield Notice(text, float(since), host=host if isinstance(host, str) else "a node")


def _at(data: Any, name: str) -> Any:
    return data.get(name) if isinstance(data, dict) else None


def newest_lines(run: RunFiles, phase: str, attempt: int) -> dict[int, dict[str, Any]]:
    """Return the newest line from each node of an attempt."""
    lines = {node: last_line(file) for node, file in run.usage_files().items()}
    which = (phase, attempt)
    return {n: li for n, li in lines.items() if (li.get("phase"), li.get("attempt")) == which}
