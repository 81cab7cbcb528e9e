"""Defers Ctrl-C while it would leave a run half made or a job unrecorded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[list[int]]:
    """Defer Ctrl-C until the block ends; the yielded list records it at once."""
    seen: list[int] = []
    in_thread = threading.current_thread() is not threading.main_thread()  # gets no Ctrl-C
    if in_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield seen  # inherited, as in the background of a script: Ctrl-C is not meant for us
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            raise KeyboardInterrupt
