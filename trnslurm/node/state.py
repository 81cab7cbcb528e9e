"""What the attempt program records: its state file, the heartbeat, and what the run has saved."""

import os
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.checkpoints import newest, newest_step
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.times import changed_at
from trnslurm.contract.variables import Variable
from trnslurm.node.processes import say

RUN = RunFiles(Path())  # the program's working directory
HEARTBEAT_S = 30.0


def note(attempt: Attempt) -> None:
    """Write an attempt's state file. An error, such as a full disk, is only logged."""
    try:
        attempt.write(RUN)
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}: state not written")


def saved_by_now() -> tuple[int, float]:
    """Return the newest saved step, and when a custom script last saved anything.

    If the script resumes only from a checkpoint that its run names, only such a checkpoint counts.
    The time is 0 if the script has only reported checkpoints.
    """
    own, one = os.environ.get(Variable.CHECKPOINTS), newest(RUN)
    looks = own and not saves_whole()
    changed = changed_at(Path(own)) if own and looks else 0.0
    return newest_step(RUN), max(changed, one.time if one else 0.0)


def has_saved_since(attempt: Attempt) -> bool:
    """Check whether there is a newer checkpoint than the one with which an attempt started."""
    step, changed = saved_by_now()
    return step > attempt.checkpoint or (saves_whole() and changed > attempt.changed)


def saves_whole() -> bool:
    """Check whether only complete checkpoints of a custom script count as saved."""
    return os.environ.get(Variable.RESUMES) in ("told", "added")


def knows_resuming() -> bool:
    """Check whether the run is a recipe, or a script that states how it resumes.

    If trnslurm has added the option, the script may save elsewhere. Then a checkpoint must exist.
    """
    custom, resumes = Variable.CHECKPOINTS in os.environ, os.environ.get(Variable.RESUMES)
    return not custom or resumes in ("told", "looks") or (resumes == "added" and bool(newest(RUN)))


@cache
def start_heartbeat() -> None:
    """Start touching the heartbeat, once. Its age shows how long a silent job has been lost."""

    def beat() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            with suppress(OSError):
                RUN.heartbeat_file.touch()

    RUN.heartbeat_file.touch()
    threading.Thread(target=beat, daemon=True).start()
