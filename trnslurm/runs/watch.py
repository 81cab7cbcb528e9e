"""Watches a run in the foreground, and resumes what does not go on by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from trnslurm.errors import NoAnswerError, NotYetError, SlurmError, SubmitError
from trnslurm.runs.follow import follow
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus

_CHECKPOINT = re.compile(r"step-(\d{8,})")

Say = Callable[[str], None]


def watch(
    run: RunDir, *, say: Say, every_s: float | None = None,
    resume: Callable[[], str] | None = None, most: int = 3,
) -> RunStatus:  # fmt: skip
    """Say every change of a run's state until it has ended for good, and return the last.

    `resume` makes it go on and says what was done; `most` is how often in a row it may be called
    without a newer checkpoint. A controller that is silent is waited for.
    """
    budget = _Budget(run, most)
    say_state, say_why = _once(say), _once(say)
    while True:
        status = _until_stuck(run, say_state, every_s, mending=resume is not None)
        if resume is None or status.mend != f"trnslurm resume {run.name}":
            return status
        if budget.used_up():
            say(f"given up: resumed {most} times without a newer checkpoint")
            return status
        try:
            say(resume())
            budget.resumed()
        except (NoAnswerError, NotYetError, SlurmError) as error:
            say_why(f"waiting: {error}")
        except SubmitError as error:  # as over a limit of the site, which others may free
            say_why(f"not resumed: {error}")
            budget.resumed()
        time.sleep(every_s or 1.0)


def newest_checkpoint(run: RunDir) -> int:
    """Return the step of the newest checkpoint; 0: there is none."""
    try:
        names = [entry.name for entry in run.checkpoints.iterdir()]
    except OSError:
        return 0
    steps = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    return max(steps, default=0)


@dataclass
class _Budget:
    """How often a run may be resumed without getting further."""

    run: RunDir
    most: int
    used: int = 0
    step: int = -1

    def used_up(self) -> bool:
        if (step := newest_checkpoint(self.run)) > self.step:
            self.used, self.step = 0, step
        return self.used >= self.most

    def resumed(self) -> None:
        self.used += 1


def _until_stuck(run: RunDir, say: Say, every_s: float | None, *, mending: bool) -> RunStatus:
    """Follow a run until it has ended or, `mending`, waits for what never comes by itself."""
    for status in follow(run, every_s):
        say(_line(status))
        if mending and status.mend:
            break
    return status


def _line(status: RunStatus) -> str:
    """Say where it stands; not how far it is, which changes all the time."""
    attempt = max((phase.attempt for phase in status.phases[-1:]), default=0)
    which = f", attempt {attempt}" if attempt > 1 else ""
    return f"{status.state}{which}{f' ({status.reason})' if status.reason else ''}"


def _once(say: Say) -> Say:
    """Do not say the same thing twice in a row."""
    last = ""

    def say_new(text: str) -> None:
        nonlocal last
        if text != last:
            say(text)
        last = text

    return say_new
