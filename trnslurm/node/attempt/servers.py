"""Starts the program that runs the servers for a job's roles, and reads its reports."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.variables import Variable
from trnslurm.node import processes
from trnslurm.node.attempt import events as e

_AT_ONCE = 1 << 16
_MORE_S = 5.0
"""How long the program may run after its servers have ended."""


class Servers:
    """The servers for the job's roles."""

    def __init__(self, command: Sequence[str], state: Attempt, *, own_session: bool) -> None:
        """Store the command that starts them; an empty command means that there are none."""
        self._command, self._own_session = [*command], own_session
        self._job = [state.job_id, str(state.restarts)]
        self._pid = self._says = self._hears = 0
        self._said = b""

    def serve(self) -> None:
        """Start the servers, or restart failed ones: Served or ServerFailed."""
        if self._pid:
            self._tell("again")
            return
        theirs, self._says = os.pipe()
        self._hears, tells = os.pipe()
        os.set_inheritable(tells, True)
        hosts = os.environ[Variable.SERVERS].split()
        program = [os.environ[Variable.PYTHON], "-m", "trnslurm.node.roles", str(tells)]
        self._pid = processes.spawn(
            [*program, *self._job, *hosts, "--", *self._command],
            input_fd=theirs,
            own_session=self._own_session,
        )
        os.close(theirs)
        os.close(tells)

    def filenos(self) -> list[int]:
        """Return the file descriptor that becomes readable when the servers report something."""
        return [self._hears] if self._hears else []

    def read(self) -> Iterator[e.Event]:
        """Yield what the servers have reported."""
        if not self._hears or not select.select([self._hears], [], [], 0)[0]:
            return
        said = os.read(self._hears, _AT_ONCE)
        if not said:
            self._forget()
            yield e.ServerFailed("the program that runs the role servers has ended")
            return
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            yield _event(json.loads(line))

    def hold(self) -> None:
        """Restart no more servers, because the job is being ended."""
        self._tell("hold")

    def finish(self, within_s: float) -> None:
        """End all servers, and wait for their ends."""
        if not self._pid:
            return
        within_s = max(within_s, 0.0)
        self._tell(f"finish {within_s:g}")
        deadline = time.monotonic() + within_s + _MORE_S
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                processes.send(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.05)
        self._pid = 0
        self._forget()

    def _tell(self, line: str) -> None:
        if self._says:
            with suppress(OSError):  # it has ended, and its end was reported
                os.write(self._says, f"{line}\n".encode())

    def _forget(self) -> None:
        for descriptor in (self._says, self._hears):
            if descriptor:
                os.close(descriptor)
        self._says = self._hears = 0
        if self._pid:
            processes.send(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _event(told: dict[str, Any]) -> e.Event:
    if failed := told.get("failed"):
        lost = tuple(failed["lost"])
        return e.ServerFailed(failed["why"], failed["log"], lost, here=failed["here"])
    return e.Served(told["ready"])
