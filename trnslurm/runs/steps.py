"""The training as it counts: of metrics.jsonl, one line for each step, whatever was done again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def lineage(file: Path) -> list[dict[str, Any]]:
    """Return the line of the newest attempt that trained each step, in the order of steps.

    An attempt that went on from a checkpoint takes back all that was done after it, also the steps
    that it has not reached yet.
    """
    try:
        with file.open("rb") as lines:
            return _newest(_whole(lines))
    except FileNotFoundError:
        return []


def _newest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    counting: list[dict[str, Any]] = []
    attempt = None
    # By attempt, because an old one that is still alive may write between a newer one's lines.
    for line in sorted(lines, key=lambda line: line["attempt"]):
        if line["attempt"] != attempt:
            attempt, first = line["attempt"], line["step"]
            counting = [done for done in counting if done["step"] < first]
        counting.append(line)
    return counting


def _whole(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # still being written, or torn when its attempt died
        if isinstance(values, dict) and _is_whole(values):
            yield values


def _is_whole(values: dict[str, Any]) -> bool:
    return all(isinstance(values.get(key), int) for key in ("attempt", "step"))
