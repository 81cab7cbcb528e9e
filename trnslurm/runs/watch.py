"""Follows a run until it ends, resumes it, and sends notifications that the nodes did not send."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.states import State
from trnslurm.errors import NoAnswerError, NotYetError, SlurmError, SubmitError
from trnslurm.node.notify import EVENT_OF, compose, end_sender, read_notify, start_sender
from trnslurm.records.foreign import is_ours, refuse_writable
from trnslurm.records.run import RunDir
from trnslurm.runs.explain import explained
from trnslurm.runs.nodes import nodes_told
from trnslurm.runs.status import RunStatus, run_status
from trnslurm.schedulers.choice import scheduler_of

_END_POLL_S = 0.02
_END_POLLS = 1500  # half a minute
_NODES_TURN_S = 15.0  # the first node takes ten seconds at most
_NODES_POLL_S = 0.2
_SENDING_S = 30.0

Say = Callable[[str], None]


def follow(
    run: RunDir, every_s: float | None = None, *, within_s: float | None = None
) -> Iterator[RunStatus]:
    """Yield the status now and after every poll. The last status is final.

    Raise a NotYetError if the run has not ended after `within_s` seconds.
    """
    deadline = time.monotonic() + (math.inf if within_s is None else within_s)
    poll_s = every_s or scheduler_of(run.record()).poll_s
    while True:
        status = run_status(run)
        yield status
        if status.final:
            break
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NotYetError(f"{run.name} is still {status.state} after {within_s:g} s")
        time.sleep(min(poll_s, left_s))
    # The next run of a chain runs in the same local job.
    if status.then and status.state is State.COMPLETED:
        return
    record = run.record()
    for _ in range(_END_POLLS):  # processes end a moment after the script wrote its state
        if not scheduler_of(record).lingers(record):
            return
        time.sleep(_END_POLL_S)


def watch(
    run: RunDir,
    *,
    say: Say,
    every_s: float | None = None,
    resume: Callable[[], str] | None = None,
    most: int = 3,
) -> RunStatus:
    """Report every change of a run's state until it has ended for good, and return its status.

    Whenever the run ends, send the notification that its nodes could not send. `resume` resumes the
    run and returns a description. Give up after `most` calls in a row that bring no newer
    checkpoint. If the controller does not answer, wait for it.
    """
    say_state, say_nodes, say_why = once_each(say), once(say), once(say)
    step, used, attempt, mend = -1, 0, 0, ""
    told: set[tuple[str, int]] = set()
    while True:
        for status in follow(run, every_s):
            # Without the progress, which changes at every poll.
            attempt = max((phase.attempt for phase in status.phases[-1:]), default=0)
            which = f", attempt {attempt}" if attempt > 1 else ""
            mend = status.mend
            if status.final or status.state is State.REQUEUED:
                status, _ = explained(run, status)
            if status.state is State.FAILED:
                mend = status.mend  # empty, or another command, if a resume would fail again
            reason = f" ({status.reason})" if status.reason else ""
            say_state(status, f"{status.state}{which}{reason}")
            nodes = nodes_told(run, status.nodes, status.attempts)
            if attempt and nodes:
                say_nodes("; ".join(f"{name}: {text}" for name, text in nodes.items()))
            if resume is not None and mend and status.state is not State.COMPLETED:
                break
        if status.final and (end := (status.state, attempt)) not in told:
            told.add(end)
            _tell_end(run, status, say)
        if status.state is State.COMPLETED:  # maybe with steps left, if train.stop_at ended the run
            return status
        # By a person or an admin: only a person resumes the run.
        begun = status.state is State.CANCELLED and status.attempts
        cancelled = begun or run.cancelled_file.exists()
        if resume is None or cancelled or mend != f"trnslurm resume {run.name}":
            return status
        if (newest := newest_step(run)) > step:
            step, used = newest, 0
        if used >= most:
            say(f"given up: resumed {most} times without a newer checkpoint")
            return status
        try:
            say(resume())
            used += 1
        except (NoAnswerError, NotYetError, SlurmError) as error:
            say_why(f"waiting: {error}")
        except SubmitError as error:  # such as a limit of the site, which may have room later
            say_why(f"not resumed: {error}")
            used += 1
        time.sleep(every_s or 1.0)


def _tell_end(run: RunDir, status: RunStatus, say: Say) -> None:
    """Send a notification about the end of a run, unless a node did. Report if sending fails.

    Nothing is sent for another user's run, because its notify command would run as this user.
    """
    notify, event = read_notify(run), EVENT_OF.get(status.state, "")
    if not notify or event not in notify.events or not is_ours(run.path):
        return
    refuse_writable(run.path, run.notify_file, *run.notifiers.rglob("*"))
    ended = next((p for p in status.phases if p.state is not State.COMPLETED), status.phases[-1])
    told = run.told_file(ended.phase, ended.attempt, event)
    with contextlib.suppress(OSError):  # the node writes the end state, then notifies
        written = run.state_file(ended.phase, ended.attempt).stat().st_mtime
        while not told.exists() and time.time() < written + _NODES_TURN_S:
            time.sleep(_NODES_POLL_S)
    if told.exists():
        return
    message = compose(
        run,
        event,
        phase=ended.phase,
        attempt=ended.attempt,
        state=status.state,
        reason=status.reason,
        what_next=status.next,
    )
    try:
        end_sender(start_sender(run, message, _SENDING_S), _SENDING_S + 1)
    except OSError as error:
        say(f"notify: {event}: not sent ({error.strerror})")


def once_each(say: Say) -> Callable[[RunStatus, str], None]:
    """Return a `say` for the states of a run that reports each state once, and a requeue once.

    While a requeued job waits, Slurm keeps changing the reason.
    """
    say_new, requeued = once(say), 0

    def say_state(status: RunStatus, text: str) -> None:
        nonlocal requeued
        attempt = max((phase.attempt for phase in status.phases[-1:]), default=0)
        if status.state is not State.REQUEUED or attempt != requeued:
            say_new(text)
        requeued = attempt if status.state is State.REQUEUED else 0

    return say_state


def once(say: Say) -> Say:
    """Return a `say` that does not repeat the previous text."""
    last = ""

    def say_new(text: str) -> None:
        nonlocal last
        if text != last:
            say(text)
        last = text

    return say_new
