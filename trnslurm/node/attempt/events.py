"""What the machine of an attempt is told, and what it decides."""

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
    """Something has happened, or an answer has come."""


class Cue(Enum):
    """An event that carries nothing but its name."""

    TICK = "tick"
    """The time has come for which the machine asked."""
    COMMITTED = "committed"
    """The compiled graphs are complete, and in the cache."""
    SAVE_ASKED = "save asked"
    """A signal asks for a last checkpoint: the time limit is near, or a user cancels."""
    AHEAD_ENDED = "ahead ended"
    """The step that was started ahead has ended."""
    COPIED = "copied"
    """The last checkpoint is in S3, or nothing copies it."""


@dataclass(frozen=True)
class MayBegin(Event):
    """The attempt may begin."""

    kill_wait_s: float
    """The time between TERM and KILL."""
    elsewhere: str = ""
    """The place in S3 of its first checkpoint, if that must be fetched."""
    checkpoint: int = 0
    changed: float = 0.0


@dataclass(frozen=True)
class Refused(Event):
    """The attempt may not begin, or a part of it has failed."""

    code: int
    message: str = ""
    state: State | None = None
    reason: str = ""
    cause: str | None = None
    doing: str = ""
    """What has failed, for the reason of the attempt's end."""


@dataclass(frozen=True)
class HasCheckpoint(Event):
    """The first checkpoint is there."""

    checkpoint: int = 0
    changed: float = 0.0


@dataclass(frozen=True)
class Keyed(Event):
    """The key of the job's graphs is known."""

    warm: bool
    """Whether there is nothing to compile."""


@dataclass(frozen=True)
class Served(Event):
    """All servers of the job's roles are ready."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Where they are."""


@dataclass(frozen=True)
class ServerFailed(Event):
    """A server does not come back, or has another node: the training must begin again."""

    why: str
    log: str = ""
    """The name of its log, ROLE-NUMBER, if that may tell more."""
    lost: tuple[str, ...] = ()
    """Nodes that do not answer."""
    here: bool = True
    """Whether the job has the nodes that its roles need."""


@dataclass(frozen=True)
class StepEnded(Event):
    """The step has ended."""

    code: int
    aborted: bool = False
    """Whether srun has aborted it: it may still return 0."""
    began: bool = True
    """Whether a node has begun its part."""
    left_over: bool = False
    """Whether srun has not waited for the end of all tasks."""


@dataclass(frozen=True)
class Terminated(Event):
    """A signal asks to end: the job is ended, or requeued."""

    why: str = ""


@dataclass(frozen=True)
class Looked(Event):
    """What the files of the run say by now."""

    saved: bool = False
    """Whether there is a newer checkpoint than at the beginning."""
    hangs: bool = False
    """Whether the step must be ended: it hangs, and its nodes do not end it."""
    enough: EndCause = EndCause.NONE
    """Why the workers must save and end now: a cap is near, or no more steps are needed."""
    grace_s: float = 0.0
    """How long they have for that."""
    grows: bool = False
    """Whether the training should start again on more nodes, which are free."""


@dataclass(frozen=True)
class Told(Event):
    """What the controller says of the job: what ends it, or RUNNING."""

    state: State


@dataclass(frozen=True)
class Answered(Event):
    """Which of the nodes that were asked answer."""

    asked: frozenset[str]
    silent: frozenset[str]


@dataclass(frozen=True)
class Judged(Event):
    """How a training has ended, and where it could go on."""

    ending: Ending | None
    """None: as its exit code says."""
    code: int
    hosts: Sequence[str] = ()
    """The nodes for another attempt in the job; empty: too few are fit."""
    bad: Any = None
    """The change of the nodes that the job leaves out."""
    lost: Sequence[str] = ()
    """Nodes of the job, not only of the attempt."""


@dataclass(frozen=True)
class Launched(Event):
    """The next attempt of the job is ready, or its script has failed."""

    state: Attempt | None
    code: int = 0
    runs: bool = False
    """Whether its step was started ahead, and trains by now."""
    launch: Any = None
    """Its command and environment."""


@dataclass(frozen=True)
class Prepared(Event):
    """The next attempt may be started ahead, or it cannot be."""

    possible: bool


@dataclass(frozen=True)
class Requeued(Event):
    """Slurm starts the job again, or why not."""

    why_not: str = ""


def brief(event: object) -> str:
    """Return an event in a few words: what it is, and what decides what follows."""
    if isinstance(event, Cue):
        return str(event.value)
    if isinstance(event, StepEnded):
        ends = [f"code {event.code}", "aborted" * event.aborted, "left over" * event.left_over]
        return f"step ended: {', '.join(filter(None, ends))}"
    if isinstance(event, Answered):
        return f"answered: {', '.join(sorted(event.silent)) or 'no node'} does not"
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
    """Something is to be done."""


class Act(Enum):
    """A decision that carries nothing but its name."""

    CHECK = "check"
    """Find out whether the attempt may begin: MayBegin or Refused."""
    END_FETCH = "end fetch"
    """Give up fetching."""
    KEY = "key"
    """Find the key of the graphs: Keyed or Refused."""
    SERVE = "serve"
    """Start the servers of the job's roles, or those that have failed: Served or ServerFailed."""
    HOLD_SERVERS = "hold servers"
    """Start no server again."""
    COMMIT = "commit"
    """Verify and store the compiled graphs: Committed or Refused."""
    BEGIN = "begin"
    """The attempt runs from now on: begin what goes on beside its step."""
    START = "start"
    """Start the step: StepEnded."""
    RECORD = "record"
    """Write the attempt's record."""
    ASK_WHAT_ENDS = "ask what ends"
    """Ask what ends the job: Told."""
    PREPARE = "prepare"
    """Prepare the next attempt, to start it ahead: Prepared."""
    START_AHEAD = "start ahead"
    """Start the step that was prepared, up to its gate: AheadEnded."""
    COPY = "copy"
    """Wait until S3 has the last checkpoint: Copied."""


@dataclass(frozen=True)
class Fetch(Decision):
    """Fetch the first checkpoint: HasCheckpoint or Refused."""

    place: str


@dataclass(frozen=True)
class Signal(Decision):
    """Send a signal to the step's process here."""

    signum: int


@dataclass(frozen=True)
class EndNodes(Decision):
    """Tell these nodes to kill their processes: Beat."""

    nodes: frozenset[int]


@dataclass(frozen=True)
class EndOrphans(Decision):
    """End what a lost first node has left running on these nodes: StepEnded."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class AskToStop(Decision):
    """Ask the workers to save and to end together; without a cause: as a user or Slurm says."""

    cause: EndCause | None = None


@dataclass(frozen=True)
class AskNodes(Decision):
    """Ask which nodes answer: Answered."""

    hosts: frozenset[str]


@dataclass(frozen=True)
class LookAtFiles(Decision):
    """Look at the files of the run: Looked."""

    silent: frozenset[int] = frozenset()
    """The nodes that give no sign of life."""


@dataclass(frozen=True)
class Judge(Decision):
    """Find out how the training has ended: Judged."""

    code: int
    lost: tuple[str, ...] = ()
    stays: bool = True
    """Whether the job is likely to go on here: no processes are left over, no limit is near."""
    capped: bool = False
    server: ServerFailed | None = None
    """The server for which the training was ended."""


@dataclass(frozen=True)
class EndAhead(Decision):
    """End the step that waits."""

    wait: bool = True


@dataclass(frozen=True)
class LaunchNext(Decision):
    """Launch the next attempt in the job: Launched."""

    hosts: tuple[str, ...]
    ahead: bool
    """Whether to use the step that waits."""


@dataclass(frozen=True)
class Requeue(Decision):
    """Give up these nodes, have Slurm start the job again, and leave out the bad ones: Requeued."""

    lost: tuple[str, ...]
    bad: Any = None
    already: bool = False
    """Whether Slurm has requeued it already."""
    leaves: bool = True
    """Whether the job gives up its lost nodes first."""


@dataclass(frozen=True)
class Close(Decision):
    """Write the final record, say why, send messages."""

    code: int
    again: bool = False
    """Whether another attempt follows in this program."""


@dataclass(frozen=True)
class EndProgram(Decision):
    """End the program."""

    code: int


@dataclass(frozen=True)
class Say(Decision):
    """Write an error into the log."""

    text: str = field(default="")
