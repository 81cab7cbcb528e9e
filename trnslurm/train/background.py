"""Questions to what may never answer, in background threads."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from trnslurm.saves.background import in_background

Result = TypeVar("Result")


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
