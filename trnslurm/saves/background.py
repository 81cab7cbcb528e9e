"""Runs work in background threads that do not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Start work in a separate thread."""
    # Not an executor: Python waits for its threads before it exits, and a worker that has failed
    # must leave at once for the launcher to see it.
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
