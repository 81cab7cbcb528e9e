"""Starts the program that copies checkpoints to S3 during training, and waits for it at the end.

The program is trnslurm.mirror, which needs boto3. This module needs only the standard library. If
the program dies, fails or is slow, training is not affected: the program is restarted or left
alone.
"""

import functools
import math
import os
import signal
import time
import traceback
from collections.abc import Callable

from trnslurm.contract.checkpoints import has_saved, newest_step
from trnslurm.contract.files import read_json
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.processes import say
from trnslurm.node.state import RUN

_PROGRAM = "trnslurm.mirror"
_FINISH = b"finish\n"  # as trnslurm.mirror.program reads it
_AGAIN_S = 60.0
_END_S = 1.0
_POLL_S = 0.05


def begins_elsewhere() -> str:
    """Return the S3 location whose newest checkpoint the run still has to fetch, or ""."""
    place = read_json(RUN.record_file).get("copied_from")
    return place if isinstance(place, str) and not has_saved(RUN) else ""


def start_fetching(place: str) -> int:
    """Start fetching that checkpoint; return the pid."""
    return processes.spawn([*_command(), "fetch", place], own_session=False)


def why_not() -> str:
    """Return the program's last error."""
    return str(read_json(RUN.mirrored_file).get("why") or "")


def _harmless(act: Callable[["MirrorProcess"], None]) -> Callable[["MirrorProcess"], None]:
    """Log an error of a method, and continue without the program from then on."""

    @functools.wraps(act)
    def do(mirror: "MirrorProcess") -> None:
        try:
            act(mirror)
        except Exception:
            say(traceback.format_exc())
            mirror.pid, mirror.again_at = 0, math.inf

    return do


class MirrorProcess:
    """The process that copies a training run's checkpoints."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted and bool(read_json(RUN.mirror_file).get("place"))
        self.pid = self._stdin = 0
        self.again_at = 0.0
        self._finishes = False

    @_harmless
    def look(self) -> None:
        """Start the program, or restart it a minute after it has died."""
        self._reap()
        if self.wanted and not self.pid and time.monotonic() >= self.again_at:
            self.again_at = time.monotonic() + _AGAIN_S
            theirs, self._stdin = os.pipe()
            self.pid = processes.spawn(
                [*_command(), "beside"], input_fd=theirs, output_fd=2, own_session=False
            )
            os.close(theirs)

    @_harmless
    def finish(self) -> None:
        """Tell the program that the training has made its last checkpoint."""
        if self.again_at < math.inf:
            self.again_at = 0.0
        self.look()
        self._finishes = True
        if self.pid:
            os.write(self._stdin, _FINISH)

    def runs(self) -> bool:
        """Check whether the program is running."""
        self._reap()
        return self.pid != 0

    @_harmless
    def end(self) -> None:
        """End the program now. The next attempt's program sends the rest."""
        deadline, told = time.monotonic() + _END_S, signal.SIGTERM
        self._reap()
        while self.pid:
            processes.send(self.pid, told)
            if time.monotonic() >= deadline:
                told = signal.SIGKILL
            time.sleep(_POLL_S)
            self._reap()

    def missing(self) -> str:
        """Return which checkpoint is not in S3 and why, or "" if none is missing."""
        newest, copied = newest_step(RUN), read_json(RUN.mirrored_file).get("step")
        if not self.wanted or not newest or copied == newest:
            return ""
        why = why_not()
        return f"the checkpoint of step {newest} is not in S3" + (f": {why}" if why else "")

    @_harmless
    def _reap(self) -> None:
        if not self.pid:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return
        os.close(self._stdin)
        self.pid = self._stdin = 0
        if not self._finishes and processes.exit_code(status) != 128 + signal.SIGTERM:
            say("warning: the program that copies checkpoints to S3 has ended; restarting it soon")


def _command() -> list[str]:
    return [os.environ[Variable.PYTHON], "-m", _PROGRAM]
