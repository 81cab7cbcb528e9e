"""The daemons of a sandbox, on the head node and on nodes: start, wait for, kill and reap them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trnslurm.errors import SandboxError

_STEP_S = 90
_POLL_S = 0.05
# Errors without information. All of Debian's daemons print the first, which causes the others.
_NOISE = re.compile(
    r"pmix|MPI|Unable to process configuration file|initialization failed|failed to initialize"
)


class Daemons:
    """Long-running children of this process, by name."""

    def __init__(self, log_of: Callable[[str], Path], where: str = "") -> None:
        """Accept a function for the daemons' logs and, for messages, the place where they run."""
        self._log_of, self._where = log_of, where
        self._running: dict[str, int] = {}

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon."""
        if name in self._running:
            raise SandboxError(f"{name}{self._where} is already running")
        with self._log_of(name).open("ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # reap() waits for it, not Popen
        self._running[name] = process.pid

    def kill(self, name: str) -> None:
        """Kill a daemon."""
        pid = self._running.pop(name, 0)
        if not pid:
            raise SandboxError(f"{name}{self._where} is not running")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def running(self) -> list[str]:
        """Return the names of the running daemons."""
        return sorted(self._running)

    def reap(self) -> set[int]:
        """Reap every child that has ended, including orphans; return their pids."""
        ended = set()
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                ended.add(pid)
        self._running = {n: p for n, p in self._running.items() if p not in ended}
        return ended

    def check(self, name: str) -> None:
        """Raise the last error of a daemon that has ended."""
        self.reap()
        if name not in self._running:
            raise SandboxError(f"{name}{self._where} ended: {_last_error(self._log_of(name))}")

    def wait(self, name: str, ready: Callable[[], bool], within_s: float = _STEP_S) -> None:
        """Wait until a daemon is ready; if it ends or takes too long, raise its last error."""
        deadline = time.monotonic() + within_s
        while not ready():
            self.check(name)
            if time.monotonic() > deadline:
                error = _last_error(self._log_of(name))
                raise SandboxError(
                    f"{name}{self._where} is not ready after {within_s:g} s: {error}"
                )
            time.sleep(_POLL_S)


def watch_children() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def run(argv: Sequence[str]) -> str:
    """Run a short command and return its output; raise its error if it fails."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_STEP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{' '.join(argv)} did not answer within {_STEP_S} s") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SandboxError(f"{' '.join(argv)}: {words}")
    return done.stdout


def _last_error(log: Path) -> str:
    """Return the error with which a daemon ended, from its output."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line]
        for word in ("fatal: ", "error: "):
            telling = [line for line in lines if word in line and not _NOISE.search(line)]
            if telling:
                return telling[-1].partition(word)[2]
        if lines:
            return lines[-1]
    return "no reason given"
