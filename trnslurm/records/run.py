"""A run: the record of its submission, the files about its attempts, and its local process."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

from trnslurm import __version__
from trnslurm.contract.attempt import PHASES, Attempt, attempt_of
from trnslurm.contract.files import (
    first_line,
    last_lines,
    load_json,
    newer_format,
    read_file,
    read_json,
    read_json_lines,
    write_json,
)
from trnslurm.contract.metrics import READ
from trnslurm.contract.rundir import PLAN, RECORD, RUN_FORMAT, RunFiles
from trnslurm.contract.times import now_there, utc_time
from trnslurm.errors import ConfigError, RunError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import (
    cleaned,
    commands_of,
    printable,
    read_fields,
    refuse_writable,
    user_name,
)

# Names from a record become parts of paths and arguments of Slurm's commands.
_NAME = r"(?!\.{0,2}$)[^/]+"
_JOB = r"\d+([_+]\d+|\.\d+)?(@\d*)?"
_LINES_WITHOUT_LOSS = 50
STAGE = "stage "
"""Prefix of a stage's name among the things that affect another stage's result."""
_FRESH_S = 60
_YEAR_S = 365 * 24 * 3600


class Record(Frozen):
    """What was submitted, by whom and from what: run.json."""

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
    """Phase -> Slurm job id, or JOB.STEP. On the local cluster, its job's pid and start time."""
    refused: str = ""
    """sbatch's error message if it rejected the submission."""
    after: str = ""
    """The run, in the same run root, from whose result this run starts."""
    needs: tuple[str, ...] = ()
    """The runs, in the same run root, that must succeed before this run's first phase starts."""
    then: str = ""
    """The run, in the same run root, that waits for this run."""
    group: str = ""
    """The sweep or pipeline that the run belongs to, or empty if there is none."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Stage -> run, for the run's pipeline. Some of the runs may be from an earlier pipeline."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """Everything that affects a stage's result: settings, files and earlier stages, with hashes."""
    values: Mapping[str, str] = field(default_factory=dict)
    """The values that the sweep set for this run."""
    behind: str = ""
    """The run, in the same run root, that must end (or fail) to make room for this run."""
    copied_from: str = ""
    """The location in S3 from whose newest checkpoint the run starts."""
    depends: str = ""
    """sbatch's dependency on a job of any kind that the first phase waits for."""
    precompile: Mapping[str, Any] = field(default_factory=dict)
    """The run's graphs: the key, and versions if known at submission.

    left_out says why there is no precompile phase. waits_for is the job of another run that
    compiles the graphs.
    """
    warned: tuple[str, ...] = ()
    """The warnings of the submission."""
    note: str = ""
    """The user's note about the run."""
    kept: bool = False
    """Whether `trnslurm keep` protects the run from removal."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> the source of its value, if known and not a default."""
    earlier: Mapping[str, int] = field(default_factory=dict)
    """Phase -> number of attempts before the run was resumed."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The run before each resume: nodes, jobs, state, reason, and the time of the resume."""
    format: int = RUN_FORMAT

    @property
    def phase_jobs(self) -> dict[str, str]:
        """Phase -> job id. Empty on the local cluster, where all phases share one process."""
        return {phase: job for phase, job in self.jobs.items() if phase in PHASES}

    @property
    def stages_before(self) -> list[str]:
        """The stages of its pipeline that the run needs."""
        names = (name.removeprefix(STAGE) for name in self.made_of if name.startswith(STAGE))
        return [name for name in names if name in self.stages]

    @property
    def awaited(self) -> tuple[str, ...]:
        """The runs that must succeed first. An older record has only the previous run."""
        return self.needs or ((self.after,) if self.after else ())

    @property
    def inside(self) -> str:
        """The user's job in which the run is a step (`submit --in`), or empty if it has its own."""
        steps = (job.partition(".") for job in self.phase_jobs.values())
        return next((job for job, dot, _ in steps if dot), "")

    @property
    def local_job(self) -> str:
        """The local job as pid@start. Empty on Slurm, and before the run is started."""
        return self.jobs.get("local", "")

    @property
    def local_job_alive(self) -> bool:
        """Check whether the local job is still running."""
        return process_alive(self.local_job)


class ByHand(Record):
    """The record of a bundle started with sbatch or bash. Its command is unknown."""


class NodeFitness(Frozen):
    """A preflight's result for one node: problems, warnings and facts."""

    host: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    clock_s: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    """Facts that must be equal on all nodes: versions, code and plan."""


class RunDir(RunFiles, kw_only=False):
    """A run directory: the paths of its files, and readers for them."""

    @property
    def name(self) -> str:
        return self.path.name

    def sibling(self, name: str) -> RunDir:
        """Return the run with another name in the same run root."""
        return type(self)(self.path.with_name(name))

    def record(self) -> Record:
        """Read run.json, or derive the record of a bundle that was started without trnslurm."""
        try:
            record = self._submitted() or _record_by_hand(self)
            if record is None:
                raise RunError(f"{self.path} is not a run directory: it has no {RECORD}")
            _check_record(record)
            told_by = self.config_file if isinstance(record, ByHand) else self.record_file
            refuse_writable(self.path, told_by)
            return replace(record, bin_dir=commands_of(record.bin_dir, self.path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{self.record_file}: damaged or unreadable ({error})") from None

    def _submitted(self) -> Record | None:
        try:
            told = load_json(self.record_file)
        except FileNotFoundError:
            return None
        _refuse_newer(self.name, told)
        return read_fields(Record, told)

    def write_record(self, record: Record) -> None:
        """Replace run.json atomically."""
        write_json(self.record_file, asdict(record))

    def phases_back(self, phase: str | None = None) -> list[str]:
        """Return the phases, last phase first, or only the given phase, which must exist."""
        phases = self.record().phases
        if phase not in (None, *phases):
            raise RunError(f"{self.name} has no phase {phase!r}, only {', '.join(phases)}")
        return [phase] if phase else [*reversed(phases)]

    def add_job(self, phase: str, job_id: str) -> None:
        """Record the job id of a phase."""
        record = self.record()
        self.write_record(replace(record, jobs={**record.jobs, phase: job_id}))

    def attempts(self, phase: str) -> list[Attempt]:
        """Return every attempt of a phase, oldest first. A half-created attempt is STARTING."""
        try:
            numbers = self.attempt_numbers(phase)
        except OSError:
            return []  # we may not read the directory
        files = ((number, read_json(self.state_file(phase, number))) for number in numbers)
        return [attempt_of(phase, number, cleaned(told)) for number, told in files]

    def attempts_since(self, record: Record, phase: str) -> list[Attempt]:
        """Return the attempts of a phase since the run was submitted or resumed."""
        return [a for a in self.attempts(phase) if a.attempt > record.earlier.get(phase, 0)]

    def newest_attempt(self, record: Record, phase: str) -> Attempt | None:
        """Return the newest of these attempts, or None if there is none."""
        return next(reversed(self.attempts_since(record, phase)), None)

    def was_stopped(self, phase: str, attempt: int) -> bool:
        """Check whether an attempt was stopped on request, in which case its end is not a crash."""
        return self.stop_file(phase, attempt).exists()

    def preflight(self, phase: str, attempt: int) -> list[NodeFitness]:
        """Return the preflight's result for each node, by rank; empty without a preflight."""
        found: list[NodeFitness] = []
        for file in self.preflight_files(phase, attempt):
            try:
                found += [read_fields(NodeFitness, node) for node in read_json(file)["nodes"]]
            except (KeyError, ValueError, TypeError, AttributeError):
                continue  # we may not read the file, or it is damaged
        return found

    def heartbeat_age_s(self) -> float | None:
        """Return the age of the latest heartbeat, or None if there was none."""
        try:
            beat = self.heartbeat_file.stat().st_mtime
        except OSError:
            return None
        age_s = time.time() - beat
        if not 0 <= age_s < _FRESH_S:  # this host's clock may be wrong
            age_s = now_there(self.state) - beat
        return max(0.0, age_s)

    def excluded(self) -> dict[str, tuple[float, str]]:
        """Return the nodes that a requeued run currently excludes: until when, and why."""
        try:
            nodes = read_json(self.excluded_file).get("nodes", {})
            entries = {
                printable(host): (float(entry["until"]), printable(str(entry["why"])))
                for host, entry in nodes.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError):
            return {}
        now = time.time()  # a time more than a year ahead is a damaged entry
        return {host: entry for host, entry in entries.items() if now < entry[0] < now + _YEAR_S}

    def first_metrics(self) -> dict[str, Any]:
        """Return the first line of metrics.jsonl, or empty if there is none yet."""
        return dict(cleaned(first_line(self.metrics_file)))

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest complete line of metrics.jsonl, without reading the entire file.

        If that line has no loss, such as the line for the last step, use the latest loss.
        """
        lines = islice(last_lines(self.metrics_file), _LINES_WITHOUT_LOSS)
        newest = next(lines, {})
        losses = ({"loss": line["loss"]} for line in chain([newest], lines) if "loss" in line)
        return dict(cleaned(next(losses, {}) | newest))

    def steps(self) -> list[dict[str, Any]]:
        """Return the line of metrics.jsonl that counts for each step, ordered by step.

        Metrics of jobs that follow the run's checkpoints are included as `NAME/metric`.
        """
        return with_followers(counting(self.lines()), self.of_followers())

    def of_followers(self) -> dict[int, dict[str, float]]:
        """Return the metrics reported by the jobs for the run's checkpoints, keyed by step."""
        found: dict[int, dict[str, float]] = {}
        for name in self.followers:
            for step, file in self.mark_files(name).items():
                run = self.sibling(str(read_json(file).get("run") or "none"))
                numbers = latest_values([run.last_metrics()]) if run.metrics_file.is_file() else {}
                if numbers:
                    own = found.setdefault(step, {})
                    own |= {f"{name}/{number}": value for number, value in numbers.items()}
        return found

    def last_steps(self, count: int) -> list[dict[str, Any]]:
        """Return at least the last `count` of these lines, reading only the file's end if possible.

        An attempt's lines are consecutive, and all lines of the newest attempt count.
        """
        end = [line for line in last_lines(self.metrics_file) if _is_step(line)]
        newest = max((line["attempt"] for line in end), default=0)
        found = [line for line in reversed(end) if line["attempt"] == newest]
        if len(found) < count:
            return self.steps()
        own = {step: n for step, n in self.of_followers().items() if step >= found[0]["step"]}
        return with_followers(found, own)

    def lines(self) -> list[dict[str, Any]]:
        """Return every line of metrics.jsonl that reports a step."""
        try:
            return [line for line in read_json_lines(self.metrics_file) if _is_step(line)]
        except FileNotFoundError:
            return []


def _is_step(line: Mapping[str, Any]) -> bool:
    """Check whether a line of metrics.jsonl reports a step."""
    return isinstance(line.get("attempt"), int) and isinstance(line.get("step"), int)


def counting(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the line that counts for each step.

    An attempt that resumes from a checkpoint undoes all later steps, including steps that it has
    not reached again yet.
    """
    found: list[dict[str, Any]] = []
    attempt = None
    # By attempt: an old attempt that is still alive may write between the lines of a newer one.
    for line in sorted(lines, key=lambda line: line["attempt"]):
        if line["attempt"] != attempt:
            attempt, first = line["attempt"], line["step"]
            found = [done for done in found if done["step"] < first]
        found.append(line)
    return found


def with_followers(
    steps: list[dict[str, Any]], numbers: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return steps with the metrics that jobs have reported for them, adding missing steps."""
    found = [*steps]
    for step in sorted(numbers):
        at = next((n for n in range(len(found), 0, -1) if found[n - 1]["step"] <= step), 0)
        if not at or found[at - 1]["step"] < step:
            beside = found[max(0, at - 1)] if found else {}
            own = {name: value for name, value in beside.items() if name in ("attempt", "time")}
            found.insert(at, {"step": step, **own})
            at += 1
        found[at - 1] = {**found[at - 1], **numbers[step]}
    return found


def latest_values(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the latest value of each metric, omitting metrics whose latest value is not finite.

    Step counters and times are not metrics.
    """
    last: dict[str, Any] = {}
    for step in steps:
        last |= step
    for name in [*last]:
        if name in ("attempt", "step", "steps", "time", READ):
            del last[name]
        elif not is_number(last[name]):  # take the latest line that has a number
            last[name] = next((s[name] for s in reversed(steps) if is_number(s.get(name))), None)
    return {n: value for n, value in last.items() if value is not None and math.isfinite(value)}


def is_number(value: Any) -> bool:
    """Check whether a value of metrics.jsonl is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class ReadOnce(RunDir):
    """A run directory that reads its attempts only once, when they are first needed."""

    @cached_property
    def _known(self) -> dict[str, list[Attempt]]:
        return {}

    def attempts(self, phase: str) -> list[Attempt]:
        """Return every attempt of a phase, as it was when first read."""
        if phase not in self._known:
            self._known[phase] = super().attempts(phase)
        return self._known[phase]


def _record_by_hand(run: RunDir) -> ByHand | None:
    """Return the record of a bundle started by hand; None if there is none or it has not begun."""
    begun = {phase for phase, _ in run.all_attempts()}
    if not begun or not (run.path / PLAN).is_file():
        return None
    from trnslurm.config.search import mapping_in  # most runs have a record

    try:
        return _told_by_bundle(run, mapping_in(read_file(run.config_file), run.config_file), begun)
    except ConfigError as error:
        raise RunError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{run.config_file}: damaged ({error})") from None


def _told_by_bundle(run: RunDir, head: Mapping[str, Any], begun: set[str]) -> ByHand:
    phases = [str(phase) for phase in head["phases"]]
    phases = phases[min(phases.index(phase) for phase in begun) :]
    newest = {phase: last for phase in phases for last in run.attempts(phase)[-1:]}
    started = [last.started for last in newest.values() if last.started]
    ids = {phase: last.job_id for phase, last in newest.items()}
    jobs = {phase: job for phase, job in ids.items() if re.fullmatch(_JOB, job)}
    return read_fields(
        ByHand,
        {
            "run": run.name,
            "name": head["name"],
            "recipe": head["recipe_name"],
            "preset": head["preset"],
            "cluster": head["cluster_name"],
            "scheduler": head["config"]["scheduler"],
            "nodes": head["nodes"],
            "phases": phases,
            "created": min(started, default=utc_time((run.path / PLAN).stat().st_mtime)),
            "user": user_name(run.path.stat().st_uid),
            "host": next((last.host for last in newest.values() if last.host), ""),
            "bin_dir": head["config"]["slurm"]["bin_dir"],
            "jobs": jobs or _local_job(run, newest.values()),
        },
    )


def _local_job(run: RunDir, attempts: Iterable[Attempt]) -> dict[str, str]:
    """Return the process of an attempt that is still running on this machine."""
    for last in attempts:
        try:
            ours = run.path.samefile(f"/proc/{last.pid}/cwd")
            here = ours and last.host == os.uname().nodename
        except OSError:  # it has ended
            here = False
        if here:
            return {"local": f"{last.pid}@{process_start(last.pid)}"}
    return {}


def _refuse_newer(name: str, told: Mapping[str, Any]) -> None:
    """Reject a run of a newer trnslurm, whose files may have another meaning."""
    if newer_format(told, RUN_FORMAT):
        versions = told.get("versions")
        by = versions.get("trnslurm") if isinstance(versions, dict) else None
        raise RunError(
            f"{name} is a run of trnslurm {printable(str(by or 'of a newer version'))}, which "
            f"version {__version__} cannot read: update trnslurm"
        )


def _check_record(record: Record) -> None:
    """Raise a ValueError if a name is unsafe in a path, or if a job or phase is invalid."""
    named = (
        record.recipe,
        record.after,
        *record.needs,
        *record.stages.values(),
        record.then,
        record.behind,
        record.group,
    )
    names = [n for n in named if n]
    jobs = [*record.jobs.values(), str(record.precompile.get("waits_for", ""))]
    wrong = [
        *(name for name in names if not re.fullmatch(_NAME, name)),
        *(job for job in jobs if job and not re.fullmatch(_JOB, job)),
        *(phase for phase in record.phases if phase not in PHASES),
    ]
    for before in record.history:
        if not (isinstance(before.get("nodes"), int) and {"state", "resumed"} <= before.keys()):
            raise ValueError(f"history has {before!r}")
    if wrong or not record.phases:
        raise ValueError(f"{wrong[0]!r}" if wrong else "no phase")


def own_process() -> str:
    """Return this process as pid@start."""
    return f"{os.getpid()}@{process_start(os.getpid())}"


def process_alive(word: str) -> bool:
    """Check whether process pid@start is still running. Pids are reused, start times are not."""
    pid, _, start = word.partition("@")
    return pid.isdigit() and bool(start) and process_start(int(pid)) == start


def process_start(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, or an empty string."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
