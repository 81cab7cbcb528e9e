"""Reads from a run's files what it did on its nodes, and which part of that counts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from trnslurm.config.catalog import catalog, find
from trnslurm.config.load import read_cluster
from trnslurm.config.search import parse_yaml
from trnslurm.config.tree import flatten
from trnslurm.contract.attempt import Attempt
from trnslurm.contract.files import read_file, read_json, read_json_lines
from trnslurm.contract.roles import Stand, read_roles
from trnslurm.contract.rundir import PREPARE
from trnslurm.contract.times import seconds_of
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import cleaned, printable
from trnslurm.records.run import Record, RunDir, counting, latest_values, with_followers
from trnslurm.runs.explain import explained
from trnslurm.runs.find import find_runs
from trnslurm.runs.status import RunStatus, statuses_of
from trnslurm.runs.tables import format_values

TRAIN = "train"
COMPILING, PREPARING = "compiling", "preparing data"
STARTING, TRAINING, UNDONE, ENDING = "starting", "training", "undone", "ending"
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    TrnslurmError,
    yaml.YAMLError,
)
Point = tuple[int, float, float, int]
"""The step, time and value of a metric, and the attempt that wrote it."""
_MOST_RUNS = 100
_MOST_NODES = 64


class Stay(Frozen):
    """An attempt of a phase on its nodes. Times are seconds since the epoch."""

    attempt: Attempt
    nodes: int
    began: float
    ended: float
    lines: Sequence[Mapping[str, Any]] = ()
    """The attempt's lines of metrics."""
    kept: int = 0
    """The number of lines that count. A later attempt repeated the others."""

    @cached_property
    def parts(self) -> list[tuple[str, float, float]]:
        """The activities of the attempt as (activity, from, to), in order and without gaps."""
        phase = self.attempt.phase
        if phase != TRAIN:
            return [(PREPARING if phase == PREPARE else COMPILING, self.began, self.ended)]
        if not self.lines:
            return [(STARTING, self.began, self.ended)]
        first, last = self.lines[0], self.lines[-1]
        marks = [
            (STARTING, _number(first, "time", self.began) - _number(first, "step_s", 0.0)),
            (TRAINING, _number(self.lines[self.kept - 1], "time", 0.0) if self.kept else 0.0),
            (UNDONE, _number(last, "time", 0.0)),
            (ENDING, self.ended),
        ]
        found, at = [], self.began
        for what, until in marks:
            until = min(max(until, at), self.ended)
            if until > at:
                found.append((what, at, until))
            at = until
        return found

    def seconds(self, *kinds: str) -> float:
        """Return how long the parts of these kinds took in total."""
        return sum(end - start for what, start, end in self.parts if what in kinds)

    @property
    def end(self) -> str:
        """The attempt's final state and the reason for it."""
        attempt = self.attempt
        return printable(f"{attempt.state}: {attempt.reason}" if attempt.reason else attempt.state)

    @property
    def redone(self) -> int:
        """The number of its steps that a later attempt repeated. Some steps have no line."""
        if self.kept == len(self.lines):
            return 0
        before = self.lines[self.kept - 1]["step"] if self.kept else self.attempt.checkpoint
        return int(self.lines[-1]["step"] - before)


class Served(Frozen):
    """A server of a role over the whole run; times are seconds since the epoch."""

    name: str
    parts: Sequence[tuple[str, float, float]]
    """How it stood, as (stand, from, to)."""
    starts: int
    why: str
    """Why it ended or did not answer last, or empty."""

    def seconds(self, *stands: str) -> float:
        """Return how long it stood so."""
        return sum(end - start for stand, start, end in self.parts if stand in stands)


class History(Frozen, kw_only=False):
    """A run and the contents of its files."""

    run: RunDir
    record: Record
    status: RunStatus

    @property
    def label(self) -> str:
        """A label for figures: the run's name, or its number and values within a sweep."""
        name, values = self.run.name, self.record.values
        return f"{name.rpartition('-')[2]}: {format_values(values)}" if values else name

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of the run's metrics."""
        return [cleaned(line) for line in self.run.lines()]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The line that counts for each step."""
        return with_followers(counting(self.lines), self.run.of_followers())

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The contents of plan.json."""
        return dict(cleaned(read_json(self.run.plan_file)))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration by dotted key, or empty if it cannot be read."""
        try:
            return dict(cleaned(dict(flatten(self._tree))))
        except _UNREADABLE:
            return {}

    @property
    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = parse_yaml(read_file(self.run.config_file))["config"]
        return tree

    @cached_property
    def stays(self) -> list[Stay]:
        """Every attempt of every phase that has begun, oldest first."""
        # For the last phase, the status has the end of killed attempts, which wrote no end.
        earlier = self.record.phases[:-1]
        attempts = [attempt for phase in earlier for attempt in self.run.attempts(phase)]
        attempts += self.status.attempts
        found = [stay for attempt in attempts if (stay := self._stay(attempt))]
        return sorted(found, key=lambda stay: stay.began)

    @cached_property
    def servers(self) -> list[Served]:
        """The servers of its roles, with the times when they were on a node."""
        try:
            lines = [cleaned(line) for line in read_json_lines(self.run.server_changes_file)]
        except OSError:
            return []
        last = max((stay.ended for stay in self.stays), default=0.0)
        known: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            if is_number(line.get("since")) and {"role", "number", "stand"} <= {*line}:
                known.setdefault(f"{line['role']} {line['number']}", []).append(line)
        return [_served(name, of_one, last) for name, of_one in known.items()]

    def _stay(self, attempt: Attempt) -> Stay | None:
        began = seconds_of(attempt.started)
        if began is None:
            return None
        lines = []
        kept = 0
        if attempt.phase == TRAIN:
            lines = [line for line in self.lines if line["attempt"] == attempt.attempt]
            kept = sum(1 for line in self.steps if line["attempt"] == attempt.attempt)
        ended = seconds_of(attempt.ended or "")
        if ended is None:  # it still runs, or was killed
            told = _number(lines[-1], "time", began) if lines else began
            newest = attempt.attempt == len(self.run.attempts(attempt.phase))
            alive = newest and not self.status.final
            ended = time.time() if alive else max(told, began)
        return Stay(
            attempt=attempt,
            nodes=attempt.nodes
            or (len(attempt.hosts.split(",")) if attempt.hosts else self._nodes_at(began)),
            began=began,
            ended=max(began, ended),
            lines=lines,
            kept=kept,
        )

    def _nodes_at(self, moment: float) -> int:
        """Return the number of nodes at a given time. A resume may have changed it."""
        for before in self.record.history:
            resumed = seconds_of(str(before["resumed"]))
            if resumed is not None and moment < resumed:
                return int(before["nodes"])
        return self.record.nodes

    @cached_property
    def price_per_hour(self) -> float | None:
        """The price of a node in US dollars per hour, or None if it is unknown or varies."""
        if any(role.component for role in read_roles(self.run.roles_file)):
            return None
        try:
            cluster = read_cluster(self._tree, str(self.run.config_file))
            return find(catalog(cluster.instance_types), cluster.instance_type).price_per_hour
        except _UNREADABLE:
            return None

    def node_hours(self, *kinds: str) -> float:
        """Return the node-hours of the run, or of its parts of certain kinds."""
        return sum(
            (stay.seconds(*kinds) if kinds else stay.ended - stay.began) * stay.nodes / 3600
            for stay in self.stays
        )

    @property
    def lost_node_hours(self) -> float:
        """The node-hours lost to interruptions."""
        return sum(hours for _, hours in self.interruptions())

    def interruptions(self) -> Iterator[tuple[Stay, float]]:
        """Yield each training attempt that was followed by another one, and the cost in node-hours.

        The cost is the time of repeated steps, of the attempt's end, and of the next attempt's
        start.
        """
        trains = [stay for stay in self.stays if stay.attempt.phase == TRAIN]
        for stay, then in itertools.pairwise(trains):
            useless = stay.seconds(UNDONE, ENDING) if stay.lines else stay.ended - stay.began
            again = then.seconds(STARTING) if then.lines else 0.0
            yield stay, (useless * stay.nodes + again * then.nodes) / 3600

    @cached_property
    def last(self) -> dict[str, float]:
        """The latest value of each metric."""
        return latest_values(self.steps)

    @cached_property
    def use(self) -> dict[int, list[dict[str, Any]]]:
        """The usage that the run's nodes recorded, by node. For a large run, the first nodes."""
        found: dict[int, list[dict[str, Any]]] = {}
        for node, file in [*self.run.usage_files().items()][:_MOST_NODES]:
            with suppress(OSError):
                lines = [cleaned(line) for line in read_json_lines(file)]
                found[node] = [line for line in lines if is_number(line.get("time"))]
        return found

    def series(self, name: str) -> list[Point]:
        """Return all values of a metric."""
        return [
            (line["step"], _number(line, "time", 0.0), line[name], line["attempt"])
            for line in self.steps
            if is_number(line.get(name))
        ]


def _served(name: str, lines: Sequence[Mapping[str, Any]], last: float) -> Served:
    """Return a server from its changes. Each change ends the previous state."""
    parts, starts = [], 0
    ends = [*(float(line["since"]) for line in lines[1:]), last]
    for line, end in zip(lines, ends, strict=True):
        start, stand = float(line["since"]), str(line["stand"])
        starts += stand == Stand.STARTING
        if stand not in (Stand.WAITING, Stand.PAUSING, Stand.DOWN) and end > start:
            parts.append((stand, start, end))
    why = next((str(line["why"]) for line in reversed(lines) if line.get("why")), "")
    return Served(name=name, parts=parts, starts=starts, why=why)


def histories_of(words: Sequence[str], roots: list[Path]) -> list[History]:
    """Return the runs with these names, each once. The name of a sweep stands for its runs."""
    found = list(dict.fromkeys(run for word in words for run in find_runs(word, roots)))
    if len(found) > _MOST_RUNS:
        raise RunError(
            f"{len(found)} runs are too many for one report: select at most {_MOST_RUNS}"
        )
    statuses, broken = statuses_of(found)
    if broken:
        raise broken[0]
    if len(found) == 1:
        statuses = [explained(found[0], statuses[0])[0]]
    return [History(run, run.record(), status) for run, status in zip(found, statuses, strict=True)]


def is_number(value: Any) -> bool:
    """Check whether a metric is a finite number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < float("inf")  # False for NaN
    )


def _number(line: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = line.get(name)
    return float(value) if is_number(value) and value is not None else otherwise
