"""Wait for what another process or thread is about to bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(
    condition: Callable[[], Any], timeout_s: float = 600, *, said: str | Callable[[], object] = ""
) -> Any:
    """Wait for something to be true, and return it; in vain, fail with what `said` says."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            story = said() if callable(said) else said or condition.__doc__
            raise AssertionError(f"still not so after {timeout_s:g} s: {story}")
        time.sleep(0.05)
    return found
