"""Finds the worker that is slower than the others, or that waits for its data.

Every worker adds up where the time of its steps goes, on the host, and publishes the sums with its
sign of life. Worker 0 compares the steps since its last look. A worker that computes longer than
the others, in several looks, makes them wait. If all wait longer than before, it may be the
network.

Where a host runs ahead of its device (neuron), the time of collectives is part of the computing, so
all look the same, and nothing is found.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from trnslurm.rundir import write_json
from trnslurm.train.environment import Environment

LOOK_S = 30.0
_LEAST_STEPS = 10
# How much longer than the others', and how much of a step at least, and in how many looks.
_LONGER, _OF_STEP, _LOOKS = 1.25, 0.05, 3
# All wait this many times longer than they usually did, and for this share of a step.
_WAIT_LONGER, _WAIT_OF_STEP, _USUAL_LOOKS = 2.0, 0.3, 3
_NEXT = ": the network? trnslurm doctor --run times the link of each node"
_NOT_COMPUTING = ("collectives", "data", "eval", "checkpoint")


class Spent(NamedTuple):
    """Where a worker's time went, in seconds."""

    steps: int = 0
    compute: float = 0.0
    data: float = 0.0
    wait: float = 0.0

    def with_step(self, spent: Mapping[str, float], seconds: float) -> "Spent":
        """Return these sums with another step."""
        told = [spent.get(name, 0.0) for name in _NOT_COMPUTING]
        compute = max(0.0, seconds - sum(told))
        return Spent(
            self.steps + 1, self.compute + compute, self.data + told[1], self.wait + told[0]
        )

    def since(self, before: "Spent") -> "Spent":
        """Return the means of the steps since then."""
        steps = self.steps - before.steps
        means = (
            (now - then) / max(1, steps) for now, then in zip(self[1:], before[1:], strict=True)
        )
        return Spent(steps, *means)


class WorkerTime(NamedTuple):
    """A worker, and what it has spent so far."""

    node: int
    host: str
    spent: Spent


class Pace:
    """What worker 0 finds about all of them, and writes for others to read."""

    def __init__(self, environment: Environment) -> None:
        self._file = environment.files.pace_file(environment.phase, environment.attempt)
        self._before: list[Spent] = []
        self._seen: dict[tuple[str, int], int] = {}
        self._waits: list[float] = []
        self._told: dict[tuple[str, int], dict[str, object]] = {}

    def look(self, step: int, workers: Sequence[WorkerTime]) -> None:
        """Compare the workers; write the file."""
        now = [worker.spent for worker in workers]
        if not self._before:
            self._before = now
        means = [each.since(before) for each, before in zip(now, self._before, strict=True)]
        if min(mean.steps for mean in means) < _LEAST_STEPS:
            return
        self._before = now
        true = dict(self._slow(workers, means))
        for about in {*self._seen, *true}:
            self._seen[about] = self._seen.get(about, 0) + 1 if about in true else 0
            if self._seen[about] == _LOOKS:
                text = f"{true[about]} since step {max(1, step - _LOOKS * means[0].steps)}"
                text += _NEXT if about[0] == "wait" else ""
                host = workers[about[1]].host if about[1] >= 0 else "all nodes"
                self._told[about] = {"text": text, "since": time.time(), "host": host}
            elif not self._seen[about]:
                self._told.pop(about, None)
        facts = {
            "step": step,
            "workers": [
                [worker.node, *(round(value, 4) for value in mean[1:])]
                for worker, mean in zip(workers, means, strict=True)
            ],
            "notices": [*self._told.values()],
        }
        with suppress(OSError):
            write_json(self._file, facts)

    def _slow(
        self, workers: Sequence[WorkerTime], means: Sequence[Spent]
    ) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield what is slow in this look: the worker, or -1 for all, and a text."""
        step_s = statistics.fmean(sum(mean[1:]) for mean in means)
        for what, verb in (("compute", "computes"), ("data", "waits for its data")):
            values: list[float] = [getattr(mean, what) for mean in means]
            usual = statistics.median_low(values)
            for rank, value in enumerate(values):
                if value > _LONGER * usual and value - usual > _OF_STEP * step_s:
                    worker = workers[rank]
                    times = f"{value / usual:.1f} times as long as" if usual else "unlike"
                    text = f"worker {rank} (node {worker.node}) {verb} {times} the others"
                    yield (what, rank), text
        wait = min(mean.wait for mean in means)  # of the last to come, which waits for none
        usual = statistics.median(self._waits) if len(self._waits) >= _USUAL_LOOKS else wait
        if wait > _WAIT_LONGER * usual and wait > _WAIT_OF_STEP * step_s:
            yield ("wait", -1), f"collectives take {wait / usual:.1f} times as long"
        else:
            self._waits.append(wait)
