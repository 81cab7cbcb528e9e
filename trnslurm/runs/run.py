"""The run directory: a bundle plus what happened to it. It alone knows every file name."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trnslurm.errors import RunError
from trnslurm.runs.foreign import commands_of, read_fields, refuse_writable
from trnslurm.runs.json_lines import first_object, last_object

_NODE_LOG = re.compile(r"(?P<phase>[a-z]+)-(?P<attempt>\d+)-node(?P<node>\d+)\.log")
_STATE_FILE = re.compile(r"(?P<phase>[a-z]+)-(?P<attempt>\d+)\.json")
# What a record names ends up in paths and in Slurm's arguments.
_NAME = re.compile(r"(?!\.{0,2}$)[^/]+")
_JOB = re.compile(r"\d+([_+]\d+)?(@\d*)?")
_PHASES = {"precompile", "train", "prepare"}


@dataclass(frozen=True, kw_only=True)
class Record:
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
    precompile: Mapping[str, Any] = field(default_factory=dict)
    """Of its graphs: key and versions where they were known at submission, why the precompile phase
    was left out (left_out), the job of another run that compiles them (waits_for)."""
    earlier: Mapping[str, int] = field(default_factory=dict)
    """Phase -> its attempts before the run was resumed."""
    history: tuple[Mapping[str, Any], ...] = ()
    """What the run was each time before it was resumed: nodes, jobs, state, reason; and when."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of one phase, as the batch script itself wrote it down."""

    phase: str
    attempt: int
    state: str = "STARTING"
    job_id: str = ""
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    hosts: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""
    ended: str | None = None


@dataclass(frozen=True)
class RunDir:
    """One run's directory; every path in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def patch_file(self) -> Path:
        """Uncommitted changes of the source tree, as they were at submission."""
        return self.path / "git.patch"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def heartbeat_file(self) -> Path:
        """Touched by the batch script every 30 seconds while it waits."""
        return self.state / "heartbeat"

    @property
    def cancelled_file(self) -> Path:
        """Exists once a person asked to cancel: Slurm forgets that of a job that never started."""
        return self.state / "cancelled.json"

    def was_stopped(self, phase: str, attempt: int) -> bool:
        """Whether an attempt was asked to stop, so that its end is no crash."""
        return (self.state / f"stop-{phase}-{attempt}.json").exists()

    @property
    def turns(self) -> Path:
        """Who submits, or has submitted, the run: one at a time."""
        return self.state / "turns"

    @property
    def files_aside(self) -> Path:
        """The files of another node count, until its own are replaced by them."""
        return self.path / ".next"

    @property
    def excluded_file(self) -> Path:
        return self.state / "excluded.json"

    @property
    def local_folder(self) -> Path:
        """What submitit's local controller writes of its own."""
        return self.state / "local"

    def beside(self, name: str) -> RunDir:
        """Return the run of another name in the same run root."""
        return RunDir(self.path.with_name(name))

    def script(self, phase: str) -> Path:
        """Return the phase's batch script, whichever scheduler it was rendered for."""
        sbatch = self.path / f"{phase}.sbatch"
        return sbatch if sbatch.exists() else self.path / f"{phase}.sh"

    def batch_logs(self, phase: str) -> list[Path]:
        """Return the batch script's own logs, oldest first."""
        logs = [f for f in self.logs.glob(f"{phase}-*.log") if not _NODE_LOG.fullmatch(f.name)]
        return sorted(logs, key=lambda f: f.stat().st_mtime)

    def node_log(self, phase: str, attempt: int, node: int) -> Path:
        return self.logs / f"{phase}-{attempt}-node{node}.log"

    def node_logs(self, phase: str, attempt: int) -> dict[int, Path]:
        """Return the logs of one attempt by node rank."""
        found = {}
        for file in self.logs.glob(f"{phase}-{attempt}-node*.log"):
            if match := _NODE_LOG.fullmatch(file.name):
                found[int(match["node"])] = file
        return dict(sorted(found.items()))

    def record(self) -> Record:
        """Read run.json."""
        try:
            record = read_fields(Record, json.loads(self.record_file.read_text(encoding="utf-8")))
            _check_record(record)
            refuse_writable(self.path)
            return replace(record, bin_dir=commands_of(record.bin_dir, self.path))
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run directory: it has no run.json") from None
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
        found = [
            _read_attempt(file, phase, int(match["attempt"]))
            for file in self.state.glob(f"{phase}-*.json")
            if (match := _STATE_FILE.fullmatch(file.name))
        ]
        return sorted(found, key=lambda a: a.attempt)

    def attempts_since(self, record: Record, phase: str) -> list[Attempt]:
        """Return the attempts of a phase since the run was submitted, or resumed."""
        return [a for a in self.attempts(phase) if a.attempt > record.earlier.get(phase, 0)]

    def heartbeat_age_s(self) -> float | None:
        """Return how long ago the batch script last showed life, or None if it never did."""
        try:
            return max(0.0, time.time() - self.heartbeat_file.stat().st_mtime)
        except OSError:
            return None

    def first_metrics(self) -> dict[str, Any]:
        """Return the first line of metrics.jsonl, empty if there is none yet."""
        return first_object(self.metrics_file)

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest whole line of metrics.jsonl, without reading all of it."""
        return last_object(self.metrics_file)


def _check_record(record: Record) -> None:
    """Raise a ValueError if it names what is no job, no phase, or lies elsewhere."""
    names = [n for n in (record.recipe, record.after, record.then) if n]
    jobs = [*record.jobs.values(), str(record.precompile.get("waits_for", ""))]
    wrong = [
        *(name for name in names if not _NAME.fullmatch(name)),
        *(job for job in jobs if job and not _JOB.fullmatch(job)),
        *(phase for phase in record.phases if phase not in _PHASES),
    ]
    if wrong or not record.phases:
        raise ValueError(f"{wrong[0]!r}" if wrong else "no phase")


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file whole, so that no reader sees half of it."""
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _read_attempt(file: Path, phase: str, attempt: int) -> Attempt:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return read_fields(Attempt, {**data, "phase": phase, "attempt": attempt})
    except (OSError, ValueError, TypeError, AttributeError):
        return Attempt(phase=phase, attempt=attempt)
