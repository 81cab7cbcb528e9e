"""Decides when a training run on fewer nodes than it may have restarts on more.

Slurm adds no nodes to a running job unless the site permits it. So the workers save, and the job is
requeued. That costs some minutes, and is worth it only if the nodes are free.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from trnslurm.contract.attempt import Attempt, read_attempt
from trnslurm.contract.files import last_line, read_json
from trnslurm.contract.rundir import PLAN
from trnslurm.contract.states import EndCause
from trnslurm.node.controller import Controller
from trnslurm.node.state import RUN

COST_S = 300.0
"""The cost of a requeue: Slurm holds a requeued job for two minutes, and training must start."""
_ASK_S = 60.0


class Growth:
    """Whether an attempt should end so that the next one can use more nodes."""

    def __init__(self, state: Attempt, controller: Controller, after_s: float) -> None:
        """Store how long an attempt trains on fewer nodes at least."""
        self._state, self._controller = state, controller
        self._began = time.monotonic()
        self._ask_at = after_s

    def wanted(self, counts: Sequence[int]) -> int:
        """Return the node count with which training should restart, or 0 if it should not."""
        passed_s = time.monotonic() - self._began
        nodes, most = len(self._state.hosts.split(",")), max(counts, default=0)
        if passed_s < self._ask_at or nodes >= most or self._was_in_vain(nodes):
            return 0
        self._ask_at = passed_s + _ASK_S
        if self._left_s(passed_s) * (1 - nodes / most) < COST_S:
            return 0
        script = RUN.script(self._state.phase)
        return most if self._controller.has_free(most - nodes, script) else 0

    def _was_in_vain(self, nodes: int) -> bool:
        """Check whether this attempt was to get more nodes than the previous one, but did not."""
        before = read_attempt(RUN, self._state.phase, self._state.attempt - 1)
        return before.cause == EndCause.GROWS and nodes <= len(before.hosts.split(","))

    def _left_s(self, passed_s: float) -> float:
        """Return how much longer training takes, or infinity if that is unknown."""
        line = read_json(RUN.path / PLAN) | last_line(RUN.metrics_file)
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            if line["attempt"] == self._state.attempt:
                step, steps = float(line["step"]), float(line["steps"])
                return (steps - step) * passed_s / max(step - self._state.checkpoint, 0.0)
        return float("inf")
