"""The events that an attempt's machine gets, and the decisions that it makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.states import EndCause, State
from trnslurm.node.ending import Ending

# -- events


@dataclass(frozen=True)
class Event:
    """Something has happened, or a reply has arrived."""


class Cue(Enum):
    """An event that carries no data."""

    TICK = "tick"
    """The time that the machine asked for has come."""
    COMMITTED = "committed"
    """The compiled graphs are complete and in the cache."""
    SAVE_ASKED = "save asked"
    """A signal asks for a last checkpoint: the time limit is near, or a user cancels the job."""
    AHEAD_ENDED = "ahead ended"
    """The job step of the standby workers has ended."""
    COPIED = "copied"
    """The last checkpoint is in S3, or nothing copies it."""


@dataclass(frozen=True)
class MayBegin(Event):
    """The attempt may start."""

    kill_wait_s: float
    """The time between SIGTERM and SIGKILL."""
    elsewhere: str = ""
    """The S3 location of its first checkpoint, if that must be fetched."""
    checkpoint: int = 0
    changed: float = 0.0


@dataclass(frozen=True)
class Refused(Event):
    """The attempt may not start, or a part of it has failed."""

    code: int
    message: str = ""
    state: State | None = None
    reason: str = ""
    cause: str | None = None
    doing: str = ""
    """What has failed, for the attempt's reason."""


@dataclass(frozen=True)
class HasCheckpoint(Event):
    """The attempt's first checkpoint is here."""

    checkpoint: int = 0
    changed: float = 0.0


@dataclass(frozen=True)
class Keyed(Event):
    """The key of the job's graphs is known."""

    warm: bool
    """Whether there is nothing to compile."""


@dataclass(frozen=True)
class Served(Event):
    """All servers for the job's roles are ready."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables with their addresses."""


@dataclass(frozen=True)
class ServerFailed(Event):
    """A server is gone for good or has moved to another node, so training must restart."""

    why: str
    log: str = ""
    """The name of its log, ROLE-NUMBER, if the log may say more."""
    lost: tuple[str, ...] = ()
    """Nodes that do not respond."""
    here: bool = True
    """Whether the job has enough nodes for its roles."""


@dataclass(frozen=True)
class StepEnded(Event):
    """The step has ended."""

    code: int
    aborted: bool = False
    """Whether srun has aborted the step. It may still return 0."""
    began: bool = True
    """Whether any node started its part."""
    left_over: bool = False
    """Whether srun did not wait for all tasks to end."""


@dataclass(frozen=True)
class Terminated(Event):
    """A signal asks the program to end: the job is being ended or requeued."""

    why: str = ""


@dataclass(frozen=True)
class Looked(Event):
    """What the run's files say at this time."""

    saved: bool = False
    """Whether there is a newer checkpoint than at the start."""
    hangs: bool = False
    """Whether the step must be ended because it hangs and its nodes do not end it."""
    enough: EndCause = EndCause.NONE
    """Why the workers must save and end now: a cap is near, or no more steps are needed."""
    grace_s: float = 0.0
    """How long the workers then have for their last save."""
    grows: bool = False
    """Whether training should restart on more nodes, which are free."""


@dataclass(frozen=True)
class Told(Event):
    """What the controller says about the job: what ends it, or RUNNING."""

    state: State


@dataclass(frozen=True)
class Answered(Event):
    """Which of the queried nodes respond."""

    asked: frozenset[str]
    silent: frozenset[str]


@dataclass(frozen=True)
class Judged(Event):
    """How training ended, and where it could continue."""

    ending: Ending | None
    """None if the exit code decides."""
    code: int
    hosts: Sequence[str] = ()
    """The nodes for another attempt in the job, or none if too few are fit."""
    bad: Any = None
    """The change to the nodes that the job leaves out."""
    lost: Sequence[str] = ()
    """Lost nodes of the whole job, not only of the attempt."""


@dataclass(frozen=True)
class Launched(Event):
    """The job's next attempt is ready, or its script has failed."""

    state: Attempt | None
    code: int = 0
    runs: bool = False
    """Whether its step ran on standby and is training now."""
    launch: Any = None
    """Its command and environment."""


@dataclass(frozen=True)
class Prepared(Event):
    """Standby workers for the next attempt can be started, or they cannot."""

    possible: bool


@dataclass(frozen=True)
class Requeued(Event):
    """Slurm will start the job again, or the reason why not."""

    why_not: str = ""


def brief(event: object) -> str:
    """Return an event in a few words: its kind and the fields that decide what follows."""
    if isinstance(event, Cue):
        return str(event.value)
    if isinstance(event, StepEnded):
        ends = [f"code {event.code}", "aborted" * event.aborted, "left over" * event.left_over]
        return f"step ended: {', '.join(filter(None, ends))}"
    if isinstance(event, Answered):
        silent = ", ".join(sorted(event.silent))
        return f"asked: {silent} did not respond" if silent else "asked: all nodes responded"
    if isinstance(event, Told):
        return f"told: {event.state}"
    if isinstance(event, Judged) and event.ending:
        return f"judged: {event.ending.state}{' in this job' * event.ending.here}"
    if isinstance(event, Refused):
        return f"refused: code {event.code} {event.message}".rstrip()
    if isinstance(event, ServerFailed):
        return f"server failed: {event.why}"
    if isinstance(event, Looked) and event.hangs:
        return "looked: hangs"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(event).__name__).lower()


# -- decisions


@dataclass(frozen=True)
class Decision:
    """Something that must be done."""


class Act(Enum):
    """A decision that carries no data."""

    CHECK = "check"
    """Find out whether the attempt may start: MayBegin or Refused."""
    END_FETCH = "end fetch"
    """Stop fetching."""
    KEY = "key"
    """Compute the key of the graphs: Keyed or Refused."""
    SERVE = "serve"
    """Start the servers of the job's roles, or restart failed ones: Served or ServerFailed."""
    HOLD_SERVERS = "hold servers"
    """Restart no more servers."""
    COMMIT = "commit"
    """Verify and store the compiled graphs: Committed or Refused."""
    BEGIN = "begin"
    """The attempt is running from now on: start what runs alongside its step."""
    START = "start"
    """Start the step: StepEnded."""
    RECORD = "record"
    """Write the attempt's record."""
    ASK_WHAT_ENDS = "ask what ends"
    """Ask Slurm what ends the job: Told."""
    PREPARE = "prepare"
    """Prepare the next attempt, for its standby workers: Prepared."""
    START_AHEAD = "start ahead"
    """Start the prepared step, which waits at its gate: AheadEnded."""
    COPY = "copy"
    """Wait until S3 has the last checkpoint: Copied."""


@dataclass(frozen=True)
class Fetch(Decision):
    """Fetch the first checkpoint: HasCheckpoint or Refused."""

    place: str


@dataclass(frozen=True)
class Signal(Decision):
    """Send a signal to this step's process on this node."""

    signum: int


@dataclass(frozen=True)
class EndNodes(Decision):
    """Order these nodes to kill their processes: Beat."""

    nodes: frozenset[int]


@dataclass(frozen=True)
class EndOrphans(Decision):
    """End what a lost first node has left running on these nodes: StepEnded."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class AskToStop(Decision):
    """Ask all workers to save and end together. Without a cause, a user or Slurm asked."""

    cause: EndCause | None = None


@dataclass(frozen=True)
class AskNodes(Decision):
    """Ask which nodes respond: Answered."""

    hosts: frozenset[str]


@dataclass(frozen=True)
class LookAtFiles(Decision):
    """Read the files of the run: Looked."""

    silent: frozenset[int] = frozenset()
    """The nodes that send no heartbeat."""


@dataclass(frozen=True)
class Judge(Decision):
    """Find out how training ended: Judged."""

    code: int
    lost: tuple[str, ...] = ()
    stays: bool = True
    """Whether the job can probably continue here: no processes are left and no limit is near."""
    capped: bool = False
    server: ServerFailed | None = None
    """The server that caused training to end."""


@dataclass(frozen=True)
class EndAhead(Decision):
    """End the step that waits on standby."""

    wait: bool = True


@dataclass(frozen=True)
class LaunchNext(Decision):
    """Launch the job's next attempt: Launched."""

    hosts: tuple[str, ...]
    ahead: bool
    """Whether to use the step that waits on standby."""


@dataclass(frozen=True)
class Requeue(Decision):
    """Release these nodes, let Slurm start the job again, and leave out the bad ones: Requeued."""

    lost: tuple[str, ...]
    bad: Any = None
    already: bool = False
    """Whether Slurm has requeued it already."""
    leaves: bool = True
    """Whether the job releases its lost nodes first."""


@dataclass(frozen=True)
class Close(Decision):
    """Write the final record, print the reason, and send messages."""

    code: int
    again: bool = False
    """Whether another attempt follows in this program."""


@dataclass(frozen=True)
class EndProgram(Decision):
    """End the program."""

    code: int


@dataclass(frozen=True)
class Say(Decision):
    """Write an error to the log."""

    text: str = field(default="")
