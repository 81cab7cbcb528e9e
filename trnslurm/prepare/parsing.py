"""JSON that others wrote: anything wrong with it is a ValueError."""

import json
from typing import Any


def parse(data: str | bytes) -> Any:
    """Read JSON."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
