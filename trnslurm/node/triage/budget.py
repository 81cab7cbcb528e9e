"""Limits the time of a diagnosis: a log's author must not decide how long others read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LIMIT_S = 30.0
"""The CPU time of a diagnosis. 64 nodes with 55 MB of logs need about a third of it."""

_LEAST_S = 0.5
"""A share that a usual log does not use up."""


class Budget:
    """The time budget of one diagnosis."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.ended = False
        """Whether anything was left out because time ran out."""
        self._clock, self._spent = clock, False
        self._end = self._share_ends = clock() + LIMIT_S

    def share(self, parts: int) -> None:
        """Give the block one of several equal parts of the remaining time."""
        now = self._clock()
        self._spent = False
        self._share_ends = min(self._end, now + max(_LEAST_S, (self._end - now) / parts))

    def is_spent(self) -> bool:
        """Check whether the share is used up. If so, the caller leaves work out."""
        self._spent = self._spent or self._clock() >= self._share_ends
        self.ended |= self._spent
        return self._spent


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def budget(clock: Callable[[], float] = time.thread_time) -> Iterator[Budget]:
    """Limit the time of the block. A diagnosis inside another one shares its time."""
    if outer := _current.get():
        yield outer
        return
    own = Budget(clock)
    token = _current.set(own)
    try:
        yield own
    finally:
        _current.reset(token)


def share(parts: int) -> None:
    """Give the block one of several equal parts of the remaining time."""
    if current := _current.get():
        current.share(parts)


def is_spent() -> bool:
    """Check whether the diagnosis must skip further work. Outside of a diagnosis, return False."""
    current = _current.get()
    return current is not None and current.is_spent()
