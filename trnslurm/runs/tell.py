"""Sends a run's end notification if its nodes did not: they died, or have no network."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from trnslurm.node.notify import EVENT_OF, compose, end_sender, read_notify, start_sender
from trnslurm.runs.foreign import is_ours
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus

_NODES_TURN_S = 15.0  # the first node takes ten seconds at most
_POLL_S = 0.2
_LIMIT_S = 30.0


def tell_end(run: RunDir, status: RunStatus, say: Callable[[str], None]) -> None:
    """Notify about the end of a run, unless a node did; say if the message cannot be sent.

    Nothing is sent for another user's run: that run's notify command would run as this user.
    """
    notify, event = read_notify(run), EVENT_OF.get(status.state, "")
    if not notify or event not in notify.events or not is_ours(run.path):
        return
    ended = next((p for p in status.phases if p.state != "COMPLETED"), status.phases[-1])
    told = run.told_file(ended.phase, ended.attempt, event)
    with contextlib.suppress(OSError):  # the node writes the end state, then notifies
        written = run.state_file(ended.phase, ended.attempt).stat().st_mtime
        while not told.exists() and time.time() < written + _NODES_TURN_S:
            time.sleep(_POLL_S)
    if told.exists():
        return
    message = compose(
        run,
        event,
        phase=ended.phase,
        attempt=ended.attempt,
        state=status.state,
        reason=status.reason,
    )
    try:
        end_sender(start_sender(run, message, _LIMIT_S), _LIMIT_S + 1)
    except OSError as error:
        say(f"notify: {event}: not sent ({error.strerror})")
