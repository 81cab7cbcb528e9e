"""The record of an attempt: state/PHASE-ATTEMPT.json.

The batch script creates the file, node/attempt.py keeps it up to date, and everything else reads
it. The files remain when accounting is off and Slurm has forgotten the job (MinJobAge).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import PREPARE, RunFiles
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import utc_time

PRECOMPILE, TRAIN = "precompile", "train"
PHASES = (PRECOMPILE, TRAIN, PREPARE)
_MAX_REASON = 400
_STATES = frozenset(map(str, State))
_TYPES: Mapping[str, Any] = {"exit_code": int, "changed": (int, float), "ended": str, "cause": str}


@dataclass
class Attempt:
    """One start of a phase."""

    phase: str
    attempt: int
    state: State = State.STARTING
    job_id: str = ""
    restarts: int = 0
    """How often Slurm had restarted the job."""
    reason: str = ""
    exit_code: int | None = None
    cause: str = EndCause.NONE
    """Why a training attempt ended: an `EndCause`."""
    checkpoint: int = 0
    """The step of the newest checkpoint when a training attempt began, or 0 if there was none."""
    changed: float = 0.0
    """When the checkpoints of a custom script had last changed before the attempt began."""
    server: str = ""
    """The server of a role that caused the attempt to end, by its log's name: ROLE-NUMBER."""
    hosts: str = ""
    nodes: int = 0
    """The number of nodes of its job, including spares; 0 if not recorded."""
    host: str = ""
    pid: int = 0
    started: str = ""
    ended: str | None = None

    @property
    def under_way(self) -> bool:
        return self.state.under_way

    @property
    def crashed(self) -> bool:
        """Whether the attempt failed or recorded no end. An end caused by Slurm is not a crash."""
        return self.under_way or self.state is State.FAILED or self.cause == EndCause.CRASH

    def become(self, state: State, reason: str = "", cause: str | None = None) -> None:
        """Change the state in memory; without a cause, the attempt keeps its current one."""
        assert self.state.may_become(state), f"an attempt that is {self.state} becomes {state}"
        self.state, self.reason = state, reason
        if cause is not None:
            self.cause = cause

    def write(self, run: RunFiles) -> None:
        """Replace the state file."""
        self.reason = _one_line(self.reason)
        self.ended = None if self.under_way else utc_time()
        data = asdict(self)
        if self.phase != TRAIN:
            del data["cause"], data["checkpoint"]
        for name in ("changed", "server"):
            if not data[name]:
                del data[name]
        write_json(run.state_file(self.phase, self.attempt), data)


def read_attempt(run: RunFiles, phase: str, attempt: int) -> Attempt:
    """Return an attempt, which is STARTING while its file is empty or damaged."""
    return attempt_of(phase, attempt, read_json(run.state_file(phase, attempt)))


def attempt_of(phase: str, attempt: int, told: Mapping[str, Any]) -> Attempt:
    """Return the attempt that a state file describes; values of a wrong type are left out."""
    found = Attempt(phase=phase, attempt=attempt)
    for name in (field.name for field in fields(Attempt)):
        value = told.get(name)
        if name == "state":
            value = State(value) if isinstance(value, str) and value in _STATES else None
        types = _TYPES.get(name) or type(getattr(found, name))
        known = name in ("phase", "attempt") or isinstance(value, bool)
        if isinstance(value, types) and not known:
            setattr(found, name, value)
    return found


def _one_line(text: str) -> str:
    """Return text as one short line that a terminal can show."""
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 1]}…"
