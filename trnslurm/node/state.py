"""The state file of an attempt, which its batch script writes: state/PHASE-ATTEMPT.json.

Accounting is often off and Slurm forgets a finished job after MinJobAge: these files stay.
"""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trnslurm.rundir import RunFiles, changed_at, read_json, utc_time, write_json

RUN = RunFiles(Path())  # the program's working directory
CRASH, ERROR = "crash", "error"
UNDER_WAY = ("STARTING", "RUNNING")
_MAX_REASON = 300


@dataclass(kw_only=True)
class AttemptState:
    """The state of an attempt."""

    phase: str = "train"
    attempt: int = 0
    job_id: str = ""
    restarts: int = 0
    """How often Slurm had started the job before."""
    state: str = "STARTING"
    reason: str = ""
    exit_code: int | None = None
    cause: str = ""
    """What ended a training: crash, error (one that would come again), time limit, preempted,
    requeued, or nothing of these."""
    checkpoint: int = 0
    """The step of the newest checkpoint when a training began, 0 if there was none."""
    changed: float = 0.0
    """When a custom script's checkpoints had last changed before the attempt began."""
    hosts: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""
    ended: str | None = None

    @property
    def under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def crashed(self) -> bool:
        """Whether the attempt failed or recorded no end; if Slurm ended it, that is no crash."""
        return self.under_way or self.state == "FAILED" or self.cause == CRASH

    def write(self) -> None:
        """Replace the file whole."""
        self.reason = _one_line(self.reason)
        self.ended = None if self.under_way else utc_time()
        data = asdict(self)
        if self.phase != "train":
            del data["cause"], data["checkpoint"]
        if not self.changed:
            del data["changed"]
        write_json(RUN.state_file(self.phase, self.attempt), data)


def read_state(phase: str, attempt: int) -> AttemptState:
    """Return the state of an attempt; one that has only taken its number is STARTING."""
    data = read_json(RUN.state_file(phase, attempt))
    state = AttemptState(phase=phase, attempt=attempt)
    for name in (f.name for f in fields(AttemptState) if f.name in data):
        default = getattr(state, name)
        if name not in ("phase", "attempt") and isinstance(data[name], type(default)):
            setattr(state, name, data[name])
    return state


def saved_by_now() -> tuple[int, float]:
    """Return the newest saved step, and when a custom script last saved anything.

    A script that is given the checkpoint to resume from resumes from no other file.
    """
    own = os.environ.get("TRNSLURM_CHECKPOINTS")
    looks = own and os.environ.get("TRNSLURM_RESUMES") != "told"
    return RUN.newest_step(), changed_at(Path(own)) if own and looks else 0.0


def _one_line(text: str) -> str:
    """Return text as one short line that a terminal can show."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:_MAX_REASON]
