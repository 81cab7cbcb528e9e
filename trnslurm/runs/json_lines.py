"""Reads a file of JSON objects, one per line, that may still be written to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trnslurm.runs.foreign import cleaned

_TAIL_BYTES = 64 * 1024


def first_object(file: Path) -> dict[str, Any]:
    """Return the object of the first line, empty if there is none yet."""
    try:
        with file.open("rb") as stream:
            return _first_of([stream.readline()])
    except OSError:
        return {}


def last_object(file: Path) -> dict[str, Any]:
    """Return the object of the newest whole line, without reading all of the file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            return _first_of(reversed(stream.read().splitlines()))
    except OSError:
        return {}


def _first_of(lines: Iterable[bytes]) -> dict[str, Any]:
    for line in lines:
        try:
            data = json.loads(line)
        except ValueError:
            continue  # cut off by the tail's start, or still being written
        if isinstance(data, dict):
            return dict(cleaned(data))
    return {}
