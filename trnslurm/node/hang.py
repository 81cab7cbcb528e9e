"""Detects that no node of a phase makes progress, names the cause, and ends the step.

A program on each node, lookout.py, reports how long the node's processes have been idle. There are
two kinds of hangs:

- All nodes are idle, and no log, metric or checkpoint has changed, for `hang_minutes`.
- Processes compute, but a job that wrote before has written nothing for four times as long. Its
  silence is also ten times as long as any earlier one.

A compiler may compute for hours without output, so a precompile hangs only if it is idle on all
nodes that have not finished their part.

It then asks the nodes for the stacks of all processes, compares what the workers do, and records
the result as the watchdog of trnslurm.train does. That watchdog finds most hangs of trnslurm's own
recipes earlier.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import last_lines, read_json, write_json, write_json_once
from trnslurm.contract.times import changed_at, now_there
from trnslurm.contract.variables import Variable
from trnslurm.node.processes import say
from trnslurm.node.stacks import place_of, waits_in
from trnslurm.node.state import RUN

_BUSY_FACTOR = 4.0
_SILENCE_FACTOR = 10.0
_OUTPUTS_TO_KNOW = 10
# How long the nodes have to write stacks and to kill their processes.
_STACKS_S = 90.0
_KILL_S = 60.0


class Worker(NamedTuple):
    """A worker's activity during a hang; rank is None if it is the node's only one."""

    rank: int | None
    node: int
    host: str
    state: str
    program: str
    """The program, and where it waits in the kernel."""
    frames: tuple[tuple[str, int, str], ...]

    @property
    def name(self) -> str:
        who = "the process" if self.rank is None else f"worker {self.rank}"
        return f"{who} (node {self.node}, {self.host})"

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        return self.state in "Tt"

    @property
    def waits(self) -> bool:
        """Whether it waits for the others: its main thread is in a collectives library."""
        return waits_in(self.frames)

    @property
    def place(self) -> str:
        """The innermost line of the script's own code, and the function that it called."""
        return place_of(self.frames) if self.frames else "an unknown place"


class HangWatch:
    """Looks for a hang while the step runs."""

    def __init__(self, state: Attempt, minutes: float) -> None:
        self._phase, self._attempt = state.phase, state.attempt
        self._hosts = len(state.hosts.split(","))
        self._limit_s = 60 * minutes
        self._numbers: list[tuple[int, int]] = []
        self._logs: list[tuple[int, int]] | None = None
        self._since = time.monotonic()
        self._longest_s = 0.0
        self._outputs = 0
        self._asked: float | None = None
        self._told: float | None = None

    def look(self, silent: Set[int] = frozenset()) -> bool:
        """Look once; return whether the step must be killed because its nodes do not end it.

        `silent` are the nodes that send no heartbeat.
        """
        now = time.monotonic()
        if self._told is not None:
            return now - self._told > _KILL_S
        if self._asked is not None:
            self._conclude(now)
        elif seconds := self._hangs(now, silent):
            facts = {"seconds": round(seconds), "time": time.time()}
            write_json(RUN.hang_file(self._phase, self._attempt), facts)
            self._asked = now
        return False

    def _hangs(self, now: float, silent: Set[int]) -> float:
        """Return how long a hanging job has written nothing, or 0 if it does not hang."""
        if self._has_grown():
            self._longest_s = max(self._longest_s, now - self._since)
            self._since = now
            self._outputs += 1
            return 0
        silent_s = now - self._since
        if silent_s < self._limit_s:
            return 0
        done = self._done()
        files = RUN.still_files(self._phase, self._attempt)
        reports = [read_json(file) for node, file in files.items() if node not in done]
        # A working node reports nothing, and neither does a node whose programs are all frozen.
        working = {*range(self._hosts)} - done - files.keys() - silent
        if not reports or working:
            return 0
        if self._saved_s_ago() < self._limit_s:
            return 0
        if min(_seconds(report, "idle_s") for report in reports) >= self._limit_s:
            return silent_s
        if self._phase != "train":
            return 0
        quiet_s = min(_seconds(report, "quiet_s") for report in reports)
        busy_s = max(_BUSY_FACTOR * self._limit_s, _SILENCE_FACTOR * self._longest_s)
        knows = self._outputs >= _OUTPUTS_TO_KNOW
        return silent_s if knows and min(silent_s, quiet_s) >= busy_s else 0

    def _done(self) -> set[int]:
        """Return the nodes that have finished their part and ended before the others."""
        compiles = self._phase == "precompile"
        files = ((node, RUN.graphs_file(self._attempt, node)) for node in range(self._hosts))
        return {node for node, file in files if compiles and file.exists()}

    def _has_grown(self) -> bool:
        """Check whether a file has changed that grows during normal training.

        The logs, one per node, are checked only if the job's other files have not changed.
        """
        numbers = _marks((RUN.metrics_file, RUN.saved_file))
        if numbers != self._numbers:
            self._numbers = numbers
            return True
        logs = _marks(RUN.node_logs(self._phase, self._attempt).values())
        before, self._logs = self._logs, logs
        return before is not None and logs != before

    def _saved_s_ago(self) -> float:
        own = os.environ.get(Variable.CHECKPOINTS)
        return now_there(RUN.state) - changed_at(Path(own) if own else RUN.checkpoints)

    def _conclude(self, now: float) -> None:
        """Record who holds up the others when all nodes have reported or the time is up."""
        assert self._asked is not None
        found = RUN.stacks_files(self._phase, self._attempt)
        if len(found) < self._hosts - len(self._done()) and now - self._asked < _STACKS_S:
            return
        reports = {node: read_json(file) for node, file in found.items()}
        workers = [w for node, report in reports.items() for w in _workers(node, report)]
        own = any(report.get("by_srun") for report in reports.values())  # as many as it likes
        count = read_json(RUN.plan_file).get("workers")
        expected = count if isinstance(count, int) and not own else 0
        seconds = round(now - self._since)
        step = next((line["step"] for line in last_lines(RUN.metrics_file) if "step" in line), 0)
        facts = judge(workers, expected=expected, seconds=seconds, step=step)
        write_json_once(RUN.stuck_file(self._phase, self._attempt), facts | {"time": time.time()})
        say(f"error: {facts['line']}; ending it (hang_minutes)")
        self._told = now


def _marks(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return the files' sizes and times."""
    marks = []
    for file in files:
        try:
            found = file.stat()
            marks.append((found.st_size, found.st_mtime_ns))
        except OSError:
            marks.append((0, 0))
    return marks


def judge(
    workers: list[Worker], *, expected: int = 0, seconds: int, step: int = 0
) -> dict[str, Any]:
    """Return who holds up the others, in one line and in parts, as the watchdog does."""
    culprits, reason = _culprits(workers, expected)
    facts: dict[str, Any] = {"rank": None, "node": None, "host": None, "step": step}
    who, verb = "no worker", "has made any progress"
    if culprits:
        first = culprits[0]
        facts |= {"rank": first.rank, "node": first.node, "host": first.host}
        who, verb = first.name, "has made no progress"
    after = f" after step {step}" if step else ""
    return facts | {"seconds": seconds, "line": f"{who} {verb} for {seconds} s{after}: {reason}"}


def _culprits(workers: list[Worker], expected: int) -> tuple[list[Worker], str]:
    """Return the workers that seem to hold up the others, judging by their stacks, and why."""
    ranks = {worker.rank for worker in workers}
    waiting = [worker for worker in workers if worker.waits]
    for_it = _who_waits(waiting)
    if stopped := [worker for worker in workers if worker.stopped]:
        return stopped, f"its process is stopped (state {stopped[0].state})"
    if missing := None not in ranks and sorted(set(range(expected)) - ranks):
        return [], f"worker {missing[0]} has ended{for_it}"
    silent = [worker for worker in workers if not worker.frames]
    others = [worker for worker in workers if worker.frames and not worker.waits]
    if waiting and others:
        return others, f"it is at {others[0].place}{for_it}"
    if waiting and silent:
        return silent, f"it does not respond to signals (state {silent[0].state}){for_it}"
    places = Counter(worker.place for worker in workers if worker.frames)
    if len(places) > 1:
        (most, count), *_ = places.most_common()
        apart = [w for w in workers if w.frames and w.place != most]
        if count > len(apart):
            return apart, f"it is at {apart[0].place}, while {count} others are at {most}"
        where = "; ".join(f"{w.name} is at {w.place}" for w in workers[:2])
        return [], where
    if places:
        everybody = f"all are at {next(iter(places))}" if len(workers) > 1 else next(iter(places))
        return [], f"{everybody}{' (check the network and the devices)' if waiting else ''}"
    return [], f"it has no Python stacks; {workers[0].program}" if workers else "no node responds"


def _who_waits(waiting: list[Worker]) -> str:
    if not waiting:
        return ""
    many = f"{len(waiting)} others wait" if len(waiting) > 1 else f"{waiting[0].name} waits"
    return f", while {many} at {waiting[0].place}"


def _workers(node: int, report: Mapping[str, Any]) -> list[Worker]:
    """Return the workers in a node's file, as far as the file is intact."""
    found = []
    listed = report.get("workers")
    for record in listed if isinstance(listed, list) else []:
        try:
            frames = tuple((str(f), int(n), str(name)) for f, n, name in record["frames"])
            rank = None if record["rank"] is None else int(record["rank"])
            host, state, program = (str(record[name]) for name in ("host", "state", "program"))
            found.append(Worker(rank, node, host, state, program, frames))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _seconds(report: Mapping[str, Any], name: str) -> float:
    value = report.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
