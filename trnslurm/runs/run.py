"""A run: what was submitted, and what its directory says about what happened since."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.rundir import (
    RECORD,
    RunFiles,
    first_line,
    last_lines,
    load_json,
    read_json,
    read_json_lines,
    write_json,
)
from trnslurm.runs.foreign import cleaned, commands_of, printable, read_fields, refuse_writable

# What a record names ends up in paths and in Slurm's arguments.
_NAME = r"(?!\.{0,2}$)[^/]+"
_JOB = r"\d+([_+]\d+)?(@\d*)?"
ERROR = "error"
"""The cause of an attempt that failed, and would fail in the same way again."""
_LINES_WITHOUT_LOSS = 50
_YEAR_S = 365 * 24 * 3600
_PHASES = {"precompile", "train", "prepare"}


class Record(Frozen):
    """What was submitted, by whom, from what: run.json."""

    run: str
    name: str
    recipe: str
    preset: str | None
    cluster: str
    scheduler: str
    nodes: int
    phases: tuple[str, ...]
    created: str
    user: str
    host: str
    bin_dir: str | None = None
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    git: Mapping[str, Any] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    jobs: Mapping[str, str] = field(default_factory=dict)
    """Phase -> Slurm job id; on the local cluster, pid and start time of the local job."""
    refused: str = ""
    """Why nothing of this was submitted, in sbatch's own words."""
    after: str = ""
    """The run beside this one whose end its first phase waits for."""
    then: str = ""
    """The run beside this one that waits for its end."""
    group: str = ""
    """The sweep that it is a run of; empty: it stands alone."""
    values: Mapping[str, str] = field(default_factory=dict)
    """What was set for this run of the sweep."""
    behind: str = ""
    """The run beside this one whose end, however it ends, makes room for it."""
    precompile: Mapping[str, Any] = field(default_factory=dict)
    """Its graphs: key and versions if known at submission, why there is no precompile phase
    (left_out), the job of another run that compiles them (waits_for)."""
    note: str = ""
    """What a person wrote about it."""
    kept: bool = False
    """Whether a person said that it must not be removed."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Key of its configuration -> where the value is from, if that was known and is no default."""
    earlier: Mapping[str, int] = field(default_factory=dict)
    """Phase -> its attempts before the run was resumed."""
    history: tuple[Mapping[str, Any], ...] = ()
    """What the run was before each resume: nodes, jobs, state, reason; and when that was."""


class Attempt(Frozen):
    """One start of one phase, as its state file has it."""

    phase: str
    attempt: int
    state: str = "STARTING"
    job_id: str = ""
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    cause: str = ""
    hosts: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""
    ended: str | None = None


class NodeFitness(Frozen):
    """One node in a preflight: what is wrong with it, and what was seen."""

    host: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    clock_s: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all nodes: versions, code and plan."""


class RunDir(RunFiles, kw_only=False):
    """A run directory: its files, and what they say about the run."""

    @property
    def name(self) -> str:
        return self.path.name

    def beside(self, name: str) -> RunDir:
        """Return the run of another name in the same run root."""
        return type(self)(self.path.with_name(name))

    def record(self) -> Record:
        """Read run.json."""
        try:
            record = read_fields(Record, load_json(self.record_file))
            _check_record(record)
            refuse_writable(self.path)
            return replace(record, bin_dir=commands_of(record.bin_dir, self.path))
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run directory: it has no {RECORD}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{self.record_file}: damaged or unreadable ({error})") from None

    def write_record(self, record: Record) -> None:
        """Replace run.json whole."""
        write_json(self.record_file, asdict(record))

    def add_job(self, phase: str, job_id: str) -> None:
        """Record the job id of a phase."""
        record = self.record()
        self.write_record(replace(record, jobs={**record.jobs, phase: job_id}))

    def attempts(self, phase: str) -> list[Attempt]:
        """Return every attempt of a phase, oldest first; a half-created one is STARTING."""
        try:
            numbers = self.attempt_numbers(phase)
        except OSError:
            return []  # not for us to read
        found = []
        for number in numbers:
            named = {"phase": phase, "attempt": number}
            try:
                said = read_json(self.state_file(phase, number))
                found.append(read_fields(Attempt, said | named))
            except (ValueError, TypeError, AttributeError):
                found.append(Attempt(phase=phase, attempt=number))
        return found

    def attempts_since(self, record: Record, phase: str) -> list[Attempt]:
        """Return the attempts of a phase since the run was submitted, or resumed."""
        return [a for a in self.attempts(phase) if a.attempt > record.earlier.get(phase, 0)]

    def was_stopped(self, phase: str, attempt: int) -> bool:
        """Check whether an attempt was asked to stop, so that its end is no crash."""
        return self.stop_file(phase, attempt).exists()

    def preflight(self, phase: str, attempt: int) -> list[NodeFitness]:
        """Return what the preflight of an attempt found, by rank; nothing if there was none."""
        found: list[NodeFitness] = []
        for file in self.preflight_files(phase, attempt):
            try:
                found += [read_fields(NodeFitness, node) for node in read_json(file)["nodes"]]
            except (KeyError, ValueError, TypeError, AttributeError):
                continue  # not for us to read, or not ours
        return found

    def heartbeat_age_s(self) -> float | None:
        """Return how long ago the job last showed life, or None if it never did."""
        try:
            return max(0.0, time.time() - self.heartbeat_file.stat().st_mtime)
        except OSError:
            return None

    def left_out(self) -> dict[str, tuple[float, str]]:
        """Return the nodes that a requeued training avoids now: until when, and why."""
        try:
            nodes = read_json(self.excluded_file).get("nodes", {})
            entries = {
                printable(host): (float(entry["until"]), printable(str(entry["why"])))
                for host, entry in nodes.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError):
            return {}
        now = time.time()  # a time that no calendar has is damage
        return {host: entry for host, entry in entries.items() if now < entry[0] < now + _YEAR_S}

    def first_metrics(self) -> dict[str, Any]:
        """Return the first line of metrics.jsonl, empty if there is none yet."""
        return dict(cleaned(first_line(self.metrics_file)))

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest whole line of metrics.jsonl, without reading all of it.

        A line may have no loss, as the one that tells of the last step: it is what was said last.
        """
        lines = islice(last_lines(self.metrics_file), _LINES_WITHOUT_LOSS)
        newest = next(lines, {})
        losses = ({"loss": line["loss"]} for line in chain([newest], lines) if "loss" in line)
        return dict(cleaned(next(losses, {}) | newest))

    def steps(self) -> list[dict[str, Any]]:
        """Return the line of metrics.jsonl that counts for each step, in the order of steps."""
        return counting(self.lines())

    def lines(self) -> list[dict[str, Any]]:
        """Return every line of metrics.jsonl that tells of a step."""
        try:
            return [
                line
                for line in read_json_lines(self.metrics_file)
                if isinstance(line.get("attempt"), int) and isinstance(line.get("step"), int)
            ]
        except FileNotFoundError:
            return []


def counting(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the line that counts for each step.

    An attempt that resumes from a checkpoint undoes everything after it, including the steps that
    it has not reached yet.
    """
    found: list[dict[str, Any]] = []
    attempt = None
    # By attempt, because an old one that is still alive may write between a newer one's lines.
    for line in sorted(lines, key=lambda line: line["attempt"]):
        if line["attempt"] != attempt:
            attempt, first = line["attempt"], line["step"]
            found = [done for done in found if done["step"] < first]
        found.append(line)
    return found


def last_numbers(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what was said last of each number of a run; of one that is not finite: nothing."""
    last: dict[str, Any] = {}
    for step in steps:
        last |= step
    for name in [*last]:
        if name in ("attempt", "step", "steps", "time"):
            del last[name]
        elif not _is_number(last[name]):  # an earlier line may have one
            last[name] = next((s[name] for s in reversed(steps) if _is_number(s.get(name))), None)
    return {n: value for n, value in last.items() if value is not None and math.isfinite(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ReadOnce(RunDir):
    """A run directory whose attempts are read when they are first asked for, and not again."""

    @cached_property
    def _known(self) -> dict[str, list[Attempt]]:
        return {}

    def attempts(self, phase: str) -> list[Attempt]:
        """Return every attempt of a phase, as it was at first."""
        if phase not in self._known:
            self._known[phase] = super().attempts(phase)
        return self._known[phase]


def _check_record(record: Record) -> None:
    """Raise a ValueError if it names something that is no job, no phase, or lies elsewhere."""
    named = (record.recipe, record.after, record.then, record.behind, record.group)
    names = [n for n in named if n]
    jobs = [*record.jobs.values(), str(record.precompile.get("waits_for", ""))]
    wrong = [
        *(name for name in names if not re.fullmatch(_NAME, name)),
        *(job for job in jobs if job and not re.fullmatch(_JOB, job)),
        *(phase for phase in record.phases if phase not in _PHASES),
    ]
    for before in record.history:
        if not (isinstance(before.get("nodes"), int) and {"state", "resumed"} <= before.keys()):
            raise ValueError(f"history has {before!r}")
    if wrong or not record.phases:
        raise ValueError(f"{wrong[0]!r}" if wrong else "no phase")
