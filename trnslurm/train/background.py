"""Runs calls that may never return in background threads."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from trnslurm.saves.background import in_background

Result = TypeVar("Result")


class Asker:
    """Makes calls that may never return, such as calls to the store of a frozen node."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Future[Any] | None = None

    def __call__(self, work: Callable[[], Result], *, patience_s: float) -> Result | None:
        """Return the result, or None if the call fails or does not return in time.

        While an earlier call has not returned, no new call is made, so at most one thread hangs.
        """
        if self._asked and not self._asked.done():
            return None
        answer = in_background(self._name, work)
        self._asked = answer
        try:
            return answer.result(patience_s)
        except Exception:
            return None
