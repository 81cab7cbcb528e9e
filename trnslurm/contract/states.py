"""The states of an attempt and of a run, and the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.contract.meant import Name


class State(Name):
    """A state: of an attempt, in its state file; of a phase; or of a run, in `trnslurm status`."""

    PENDING = "PENDING"
    HELD = "HELD"
    CONFIGURING = "CONFIGURING"
    """Its nodes are booting."""
    STARTING = "STARTING"
    """For an attempt: its batch script is preparing the step."""
    PRECOMPILING = "PRECOMPILING"
    """For a run: its first phase is running."""
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"
    """Slurm will start the next attempt."""
    RESTARTED = "RESTARTED"
    """For an attempt: the next attempt has started in the same job."""
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    LOST = "LOST"
    """It ended without recording how."""
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    STOPPED = "STOPPED"
    """The workers saved and ended together on request."""
    TIMEOUT = "TIMEOUT"

    # What users of the Python API see: 'FAILED', as in JSON.
    __repr__ = str.__repr__

    @property
    def final(self) -> bool:
        """Whether nothing follows in a phase or a run, unless a user resumes it."""
        return self in _FINAL

    @property
    def waiting(self) -> bool:
        """Whether the first attempt has yet to start."""
        return self in (State.PENDING, State.HELD, State.CONFIGURING)

    @property
    def queued(self) -> bool:
        """Whether an attempt has yet to start."""
        return self in (State.PENDING, State.HELD, State.REQUEUED)

    @property
    def alive(self) -> bool:
        """Whether a run has an attempt in progress."""
        return self in (State.RUNNING, State.PRECOMPILING)

    @property
    def under_way(self) -> bool:
        """Whether an attempt has not recorded its end."""
        return self in (State.STARTING, State.RUNNING)

    @property
    def written(self) -> bool:
        """Whether an attempt that recorded this state has ended its phase."""
        return self.final and self not in (State.LOST, State.NODE_FAIL)

    @property
    def failed(self) -> bool:
        """Whether a phase or run ended with a failure, which its logs may explain."""
        return self in (State.FAILED, State.LOST, State.NODE_FAIL)

    @property
    def stopped_short(self) -> bool:
        """Whether a run ended before its last step without being cancelled by a user."""
        return self.final and self not in (State.COMPLETED, State.CANCELLED)

    def may_become(self, other: State) -> bool:
        """Check whether an attempt's record can change from this state to the other."""
        return other is self or other in NEXT.get(self, ())


class EndCause(Name):
    """Why an attempt of a training run ended, or was asked to end."""

    NONE = ""
    CRASH = "crash"
    ERROR = "error"
    """An error that every further attempt would hit."""
    GROWS = "more nodes"
    """The run restarts on more nodes."""
    CAP = "cap"
    """The run has used up its cap."""
    ENOUGH = "enough"
    """Newer checkpoints are no better."""
    REPEATS = "repeats"
    """The attempt began where the previous one had begun."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"


_FINAL = frozenset(
    (
        State.CANCELLED,
        State.COMPLETED,
        State.FAILED,
        State.LOST,
        State.NODE_FAIL,
        State.PREEMPTED,
        State.STOPPED,
        State.TIMEOUT,
    )
)
OF_A_RUN = (
    *(State.PENDING, State.HELD, State.CONFIGURING, State.PRECOMPILING, State.RUNNING),
    *(State.REQUEUED, *sorted(_FINAL)),
)
"""Every state of a run, in the order of a run's life."""

_BY_SLURM = (State.CANCELLED, State.FAILED, State.PREEMPTED, State.REQUEUED, State.TIMEOUT)
_ENDS = (*_BY_SLURM, State.COMPLETED, State.STOPPED)
NEXT: Mapping[State, tuple[State, ...]] = {
    State.STARTING: (State.RUNNING, *_ENDS),
    State.RUNNING: (State.RESTARTED, *_ENDS),
    # An attempt that Slurm ends immediately records what Slurm says, because KILL follows, and
    # then how the workers ended. An attempt that is to be requeued can be refused, or restarted
    # instead.
    **dict.fromkeys(_BY_SLURM, (State.RESTARTED, *_ENDS)),
    # The first node was lost before the next attempt began, or before it could reach Slurm. Other
    # nodes continue from here.
    State.RESTARTED: (State.RUNNING, State.REQUEUED),
    State.REQUEUED: (State.RUNNING, State.RESTARTED, *_ENDS),
}
"""The states that can follow a state in the record of an attempt."""
