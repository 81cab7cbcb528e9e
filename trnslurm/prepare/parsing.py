"""JSON that others wrote: anything wrong with it is a ValueError."""

import json
from pathlib import Path
from typing import Any


def parse(data: str | bytes) -> Any:
    """Read JSON."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file; None if it is missing or damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
