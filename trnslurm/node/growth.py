"""Decides when a training that has fewer nodes than it may have starts again on more.

Slurm gives a running job no more nodes, unless a site permits it. So the training saves, and its
job is requeued. That costs some minutes, and is worth it only if the nodes are there.
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
"""What a requeue costs: Slurm lets a requeued job wait for two minutes, and the training starts."""
_ASK_S = 60.0


class Growth:
    """Whether an attempt should give way to one on more nodes."""

    def __init__(self, state: Attempt, controller: Controller, after_s: float) -> None:
        """Take how long an attempt trains on fewer nodes at least."""
        self._state, self._controller = state, controller
        self._began = time.monotonic()
        self._ask_at = after_s

    def wanted(self, counts: Sequence[int]) -> int:
        """Return on how many nodes the training should start again; 0: it should not."""
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
        """Check whether this attempt was to have more nodes than the one before, and has not."""
        before = read_attempt(RUN, self._state.phase, self._state.attempt - 1)
        return before.cause == EndCause.GROWS and nodes <= len(before.hosts.split(","))

    def _left_s(self, passed_s: float) -> float:
        """Return how long the training still takes; infinite if that is unknown."""
        line = read_json(RUN.path / PLAN) | last_line(RUN.metrics_file)
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            if line["attempt"] == self._state.attempt:
                step, steps = float(line["step"]), float(line["steps"])
                return (steps - step) * passed_s / max(step - self._state.checkpoint, 0.0)
        return float("inf")
