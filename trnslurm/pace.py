"""Finds a worker that is slower than the others, or that waits for its data.

Every worker adds up where the time of its steps goes and publishes the sums: our jobs together with
their heartbeat (train/loop/watchdog.py), custom scripts through ddp_pace.py. Worker 0 compares the
steps since its previous look. A worker that computes longer than the others in several looks makes
them wait. If all workers wait longer than before, the network may be the cause. Standard library
only.

If a host runs ahead of its device (neuron), collective time counts as computing time, so all
workers look the same, and no slow worker is found.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trnslurm.contract.files import write_json

LOOK_S = 30.0
_LEAST_STEPS = 10
# How much longer than the others', and how much of a step at least, and in how many looks. Most of
# the others must wait for half of that: else they are not held up, and a collective inside of what
# counts as computing may be what took long.
_LONGER, _OF_STEP, _LOOKS = 1.25, 0.05, 3
# All wait this many times longer than they usually did, and for this share of a step.
_WAIT_LONGER, _WAIT_OF_STEP, _USUAL_LOOKS = 2.0, 0.3, 3
_NEXT = ": check the network with trnslurm doctor --run, which times the link of each node"
NOT_COMPUTING = ("collectives", "data", "eval", "checkpoint")


class Spent(NamedTuple):
    """Where a worker's time went, in seconds."""

    steps: int = 0
    compute: float = 0.0
    data: float = 0.0
    wait: float = 0.0

    def with_step(self, spent: Mapping[str, float], seconds: float) -> Spent:
        """Return these sums plus another step."""
        told = [spent.get(name, 0.0) for name in NOT_COMPUTING]
        compute = max(0.0, seconds - sum(told))
        return Spent(
            self.steps + 1, self.compute + compute, self.data + told[1], self.wait + told[0]
        )

    def since(self, before: Spent) -> Spent:
        """Return the means over the steps since `before`."""
        steps = self.steps - before.steps
        means = ((now - then) / max(1, steps) for now, then in zip(self[1:], before[1:]))
        return Spent(steps, *means)


class WorkerTime(NamedTuple):
    """A worker and the time it has spent so far."""

    node: int
    host: str
    spent: Spent


class Pace:
    """What worker 0 finds about all workers, and writes for others to read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before: list[Spent] = []
        self._step = 0
        self._since: dict[tuple[str, int], tuple[int, int]] = {}
        """What is slow: since which step, and in how many looks in a row."""
        self._waits: deque[float] = deque(maxlen=1000)
        self._told: dict[tuple[str, int], dict[str, object]] = {}

    def look(self, step: int, workers: Sequence[WorkerTime]) -> None:
        """Compare the workers and write the file."""
        now = [worker.spent for worker in workers]
        if not self._before:
            self._before, self._step = now, step
        means = [each.since(before) for each, before in zip(now, self._before)]
        if min(mean.steps for mean in means) < _LEAST_STEPS:
            return
        before, self._before, self._step = self._step, now, step
        true = dict(self._slow(workers, means))
        for about in {*self._since, *true}:
            if about not in true:
                del self._since[about]
                self._told.pop(about, None)
                continue
            since, looks = self._since.get(about, (before, 0))
            self._since[about] = since, looks + 1
            if looks + 1 == _LOOKS:
                text = f"{true[about]} since step {max(1, since)}"
                text += _NEXT if about[0] == "wait" else ""
                told: dict[str, object] = {"text": text, "since": time.time(), "host": "all nodes"}
                if about[1] >= 0:
                    worker = workers[about[1]]
                    told |= {"host": worker.host, "node": worker.node, "what": about[0]}
                self._told[about] = told
        facts = {
            "step": step,
            "workers": [
                [worker.node, *(round(value, 4) for value in mean[1:])]
                for worker, mean in zip(workers, means)
            ],
            "notices": [*self._told.values()],
        }
        with suppress(OSError):
            write_json(self._file, facts)

    def _slow(
        self, workers: Sequence[WorkerTime], means: Sequence[Spent]
    ) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield what is slow now: the worker (-1 for all), and a description."""
        step_s = statistics.fmean(sum(mean[1:]) for mean in means)
        waits = [mean.wait for mean in means]
        # Where a collective is part of the computing, waiting for slow data may be there.
        rests = [mean.compute + mean.wait for mean in means]
        for what, verb, others in (
            ("compute", "computes", waits),
            ("data", "waits for its data", rests),
        ):
            values: list[float] = [getattr(mean, what) for mean in means]
            usual, patient = statistics.median_low(values), statistics.median_high(others)
            for rank, value in enumerate(values):
                more = value - usual
                held_up = patient - others[rank] > more / 2
                if value > _LONGER * usual and more > _OF_STEP * step_s and held_up:
                    worker = workers[rank]
                    times = f"{value / usual:.1f} times as long as" if usual else "unlike"
                    text = f"worker {rank} (node {worker.node}) {verb} {times} the others"
                    yield (what, rank), text
        wait = min(waits)  # of the last to come, which waits for none
        usual = statistics.median(self._waits) if len(self._waits) >= _USUAL_LOOKS else wait
        if wait > _WAIT_LONGER * usual > 0 and wait > _WAIT_OF_STEP * step_s:
            yield (
                ("wait", -1),
                (f"workers wait {wait / usual:.1f} times as long as before in collectives"),
            )
        else:
            self._waits.append(wait)
