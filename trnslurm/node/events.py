"""Sends messages about an attempt: it starts, stalls, is requeued, or has ended.

A separate process sends each message while training continues. An error in this module never fails
an attempt. The program waits for the messages only at the end of the attempt, for a few seconds.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.checkpoints import has_saved, saves_in
from trnslurm.contract.files import last_lines, read_json
from trnslurm.contract.metrics import is_reported
from trnslurm.contract.states import EndCause, State
from trnslurm.contract.times import changed_at
from trnslurm.node.hosts import brief
from trnslurm.node.notify import EVENT_OF, compose, end_sender, read_notify, start_sender
from trnslurm.node.processes import say
from trnslurm.node.state import RUN
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.node.triage.finding import Finding
from trnslurm.node.triage.mend import in_words, longer, way_back
from trnslurm.node.usage.read import notices

BESIDE_S = 60.0
"""How long a message may take while the attempt is running."""
END_S = 10.0
"""How long a message may take at the attempt's end."""
_LEAST_S = 0.5
# The sender needs a moment to start, and reports its own errors.
_SHARE = 0.8
_MOST_PERIOD_S = 15.0
_GAPS_TO_LEARN = 3
_MOST_LINES = 100
_TOGETHER_S = 0.01
# The limits of the recipes, for a run without a watchdog, such as a custom script.
_FACTOR, _MIN_S = 20.0, 120.0


@contextmanager
def _ignored(event: str) -> Iterator[None]:
    """Log any error of the block or function, and let the attempt continue."""
    try:
        yield
    except Exception as error:
        say(f"notify: {event}: not sent ({error!r})")


class Messages:
    """The messages of one attempt."""

    def __init__(self, state: Attempt, senders: list[subprocess.Popen[bytes]]) -> None:
        """Store an attempt, and the senders of earlier attempts in this program."""
        self._state = state
        self._notify = read_notify(RUN)
        self._senders = senders
        self._stall = StallWatch(state.attempt)
        self._noticed: set[tuple[str, float]] = set()
        self._ended = threading.Event()

    @_ignored("start")
    def begun(self, before: list[Attempt]) -> None:
        """Send that the attempt starts. If the previous attempt recorded no end, also send that it
        died."""
        if before and before[-1].under_way:
            first = before[-1].hosts.partition(",")[0]
            why = (
                f"it ended without recording its state, which happens when {first or 'its node'} "
                "fails"
            )
            self._tell("requeue", State.REQUEUED, why, attempt=before[-1].attempt)
        self._tell("start", self._state.state)
        watched = {"stall", "notice"} & {*self._notify.events} if self._notify else {}
        if watched and self._state.phase == "train":
            threading.Thread(target=self._watch, daemon=True).start()

    @_ignored("end")
    def ended(self, within_s: float, found: Callable[[], Finding | None]) -> None:
        """Send how the attempt ended, and wait until all messages are sent or the time is up.

        Restarts do not wait for messages. `found` returns what triage has found already.
        """
        restarts = self._state.state is State.RESTARTED
        within_s = min(END_S, max(_LEAST_S, within_s))
        deadline = time.monotonic() + within_s
        self._ended.set()
        state = self._state
        limit_s = BESIDE_S if restarts else _SHARE * within_s
        if self._notify and self._stall.stuck():  # the watchdog has just ended it
            self._tell_stall(limit_s)
        # After the precompile, the run continues with training.
        ahead = state.phase == "precompile" and RUN.script("train").exists()
        if not (ahead and state.state is State.COMPLETED):
            event = EVENT_OF.get(state.state, "failure")
            self._tell(event, state.state, state.reason, limit_s=limit_s, found=found)
        for sender in self._senders if not restarts else ():
            if not end_sender(sender, deadline - time.monotonic()):
                say("notify: a message was not sent before the attempt ended")

    def _watch(self) -> None:
        """Send a message about every stall, and about what nodes notice, while the attempt runs."""
        while not self._ended.wait(self._stall.period_s):
            with _ignored("stall"):
                if self._stall.seen(time.time()):
                    self._tell_stall(BESIDE_S)
            with _ignored("notice"):
                self._tell_notices()

    def _tell_notices(self) -> None:
        """Send one message about everything that the nodes have noticed for the first time."""
        new: dict[str, list[str]] = {}
        for notice in notices(RUN, self._state.phase, self._state.attempt):
            if (which := (notice.host, notice.since)) not in self._noticed:
                self._noticed.add(which)
                new.setdefault(notice.text, []).append(notice.host)
        if new:
            said = [f"{brief(hosts)}: {text}" for text, hosts in new.items()]
            self._tell("notice", State.RUNNING, "; ".join(said))

    def _tell_stall(self, limit_s: float) -> None:
        if not self._stall.told:
            self._stall.told = True
            self._tell("stall", State.RUNNING, self._stall.reason, limit_s=limit_s)

    def _tell(
        self,
        event: str,
        state: State,
        reason: str = "",
        *,
        attempt: int = 0,
        limit_s: float = BESIDE_S,
        found: Callable[[], Finding | None] | None = None,
    ) -> None:
        """Start sending a message about an event, if the run asks for such messages."""
        if not self._notify or event not in self._notify.events:
            return
        with _ignored(event):
            message = compose(
                RUN,
                event,
                phase=self._state.phase,
                attempt=attempt or self._state.attempt,
                state=state,
                reason=reason,
                what_next=what_next(self._state, found) if found else "",
            )
            self._senders.append(start_sender(RUN, message, limit_s))


def what_next(state: Attempt, found_before: Callable[[], Finding | None]) -> str:
    """Return what to do after an attempt that has ended its run, or "" for nothing."""
    record = read_json(RUN.record_file)
    capped = state.cause == EndCause.CAP  # the reason says what more attempts need
    if not state.state.stopped_short or capped or "run" not in record:
        return ""
    saved = bool(has_saved(RUN) or changed_at(saves_in(RUN)))
    if state.state is State.TIMEOUT and not saved:
        return in_words(*longer(record))
    if state.state is not State.FAILED:
        return f"trnslurm resume {record['run']}"
    # Unless the attempt has failed, a log's last lines are not a finding.
    found = found_before() or diagnose(RUN.path.absolute(), state.phase, state.attempt)
    if not found:
        return "" if state.cause == EndCause.ERROR else f"trnslurm resume {record['run']}"
    given_up = "given up after" in state.reason
    way = way_back(record, found.mend, found.fix, found.options, saved=saved, given_up=given_up)
    return in_words(*way)


class StallWatch:
    """Checks in an attempt's files whether its workers make progress."""

    def __init__(self, attempt: int) -> None:
        train = read_json(RUN.plan_file).get("train")
        train = train if isinstance(train, dict) else {}
        self._factor = _number(train.get("watchdog"), _FACTOR)
        self._least_s = _number(train.get("watchdog_min_s"), _MIN_S)
        self.period_s = min(_MOST_PERIOD_S, max(0.1, self._least_s / 20))
        self.reason = ""
        self.told = False
        """Whether a message about this stall was sent."""
        self._attempt = attempt
        self._step = 0

    def seen(self, now: float) -> bool:
        """Return whether there is a stall at this time."""
        return self.stuck() or self._silent(now)

    def stuck(self) -> bool:
        """Check whether the watchdog has found a worker that makes no progress."""
        stuck = read_json(RUN.stuck_file("train", self._attempt))
        if stuck:
            line = " ".join(str(stuck.get("line", "stuck")).split())
            self.reason = "".join(c for c in line if c.isprintable())[:300]
        return bool(stuck)

    def _silent(self, now: float) -> bool:
        """Check whether no step was reported for longer than the watchdog would wait.

        Evaluations and saves report no steps, so the silence must also be twice the longest pause
        so far. Metrics that were read from a script's output may end before its steps do.
        """
        lines = [
            (line["step"], float(line["time"]))
            for line in islice(last_lines(RUN.metrics_file), _MOST_LINES)
            if line.get("attempt") == self._attempt and isinstance(line.get("step"), int)
            if isinstance(line.get("time"), (int, float)) and is_reported(line)
        ][::-1]
        step, at = lines[-1] if lines else (0, now)
        if step != self._step:
            self._step, self.told = step, False
        # Steps that were reported together have nearly the same time.
        gaps = [b - a for (_, a), (_, b) in zip(lines, lines[1:]) if b - a > _TOGETHER_S]
        if len(gaps) < _GAPS_TO_LEARN or not self._factor:
            return False
        usual_s = max(statistics.median(gaps), statistics.fmean(gaps))
        self.reason = f"no step for {now - at:.0f} s after step {step}"
        return now - at > max(self._least_s, self._factor * usual_s, 2 * max(gaps))


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise
