"""Where the time of a worker goes, as far as its host can see."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Seconds spent by name since they were last taken."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self.doing = ""
        """The innermost block that this worker is in."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        start = time.monotonic()
        before, self.doing = self.doing, name
        try:
            yield
        finally:
            self.doing = before
            self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Return what was spent, and start over."""
        spent, self._spent = self._spent, {}
        return spent
