"""The state file of an attempt, which its batch script writes: state/PHASE-ATTEMPT.json.

The files remain when accounting is off and Slurm has forgotten the job (MinJobAge).
"""

import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from trnslurm.node.processes import say
from trnslurm.rundir import RunFiles, changed_at, read_json, utc_time, write_json

RUN = RunFiles(Path())  # the program's working directory
CRASH, ERROR, CAP, REPEATS = "crash", "error", "cap", "repeats"
UNDER_WAY = ("STARTING", "RUNNING")
HEARTBEAT_S = 30.0
_MAX_REASON = 400


@dataclass(kw_only=True)
class AttemptState:
    """The state of an attempt."""

    phase: str = "train"
    attempt: int = 0
    job_id: str = ""
    restarts: int = 0
    """How often Slurm had restarted the job."""
    state: str = "STARTING"
    reason: str = ""
    exit_code: int | None = None
    cause: str = ""
    """Why a training ended: crash, error (which every attempt would meet), cap, time limit,
    preempted, requeued, or empty."""
    checkpoint: int = 0
    """The step of the newest checkpoint when a training began, 0 if there was none."""
    changed: float = 0.0
    """When the checkpoints of a custom script had last changed before the attempt began."""
    hosts: str = ""
    nodes: int = 0
    """Of the job: the spares are no hosts."""
    host: str = ""
    pid: int = 0
    started: str = ""
    ended: str | None = None

    @property
    def under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def crashed(self) -> bool:
        """Whether the attempt failed or recorded no end; an end by Slurm is no crash."""
        return self.under_way or self.state == "FAILED" or self.cause == CRASH

    def note(self, state: str | None = None, reason: str = "") -> None:
        """Write the file, with a new state; an error, such as a full disk, is only logged."""
        if state is not None:
            self.state, self.reason = state, reason
        try:
            self.write()
        except OSError as error:
            say(f"error: {error.filename}: {error.strerror}: state not written")

    def write(self) -> None:
        """Replace the whole file."""
        self.reason = _one_line(self.reason)
        self.ended = None if self.under_way else utc_time()
        data = asdict(self)
        if self.phase != "train":
            del data["cause"], data["checkpoint"]
        if not self.changed:
            del data["changed"]
        write_json(RUN.state_file(self.phase, self.attempt), data)


def read_state(phase: str, attempt: int, run: RunFiles = RUN) -> AttemptState:
    """Return the state of an attempt; without a state file it is STARTING."""
    data = read_json(run.state_file(phase, attempt))
    state = AttemptState(phase=phase, attempt=attempt)
    for name in (f.name for f in fields(AttemptState) if f.name in data):
        default = getattr(state, name)
        if name not in ("phase", "attempt") and isinstance(data[name], type(default)):
            setattr(state, name, data[name])
    state.ended = data["ended"] if isinstance(data.get("ended"), str) else None
    return state


def saved_by_now() -> tuple[int, float]:
    """Return the newest saved step, and when a custom script last saved anything.

    The time is 0 if the script resumes only from a checkpoint that its run names.
    """
    own = os.environ.get("TRNSLURM_CHECKPOINTS")
    looks = own and os.environ.get("TRNSLURM_RESUMES") != "told"
    return RUN.newest_step(), changed_at(Path(own)) if own and looks else 0.0


def knows_resuming() -> bool:
    """Check whether a job of trnslurm runs, or a script that states how it resumes."""
    custom = "TRNSLURM_CHECKPOINTS" in os.environ
    return not custom or os.environ.get("TRNSLURM_RESUMES") in ("told", "looks")


@cache
def start_heartbeat() -> None:
    """Touch the heartbeat from now on, once; its age shows how long a silent job has been lost."""

    def beat() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            with suppress(OSError):
                RUN.heartbeat_file.touch()

    RUN.heartbeat_file.touch()
    threading.Thread(target=beat, daemon=True).start()


def _one_line(text: str) -> str:
    """Return text as one short line that a terminal can show."""
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 1]}…"
