"""Work in background threads, for which the process does not wait when it exits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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


class Asker:
    """Asks something that may never answer, such as the store of a frozen node."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Future[Any] | None = None

    def __call__(self, work: Callable[[], Result], *, patience_s: float) -> Result | None:
        """Return the answer; None if it fails or does not come in this time.

        While an earlier question is unanswered, ask nothing: at most one thread hangs.
        """
        if self._asked and not self._asked.done():
            return None
        answer = in_background(self._name, work)
        self._asked = answer
        try:
            return answer.result(patience_s)
        except Exception:
            return None
