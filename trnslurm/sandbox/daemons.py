"""The daemons that the holder starts: start, wait for, kill and reap them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_STEP_S = 90
_POLL_S = 0.05
# Errors without information: all of Debian's daemons print the first, which causes the others.
_NOISE = re.compile(
    r"pmix|MPI|Unable to process configuration file|initialization failed|failed to initialize"
)


class BootError(Exception):
    """Why a step failed, in one line."""


class Daemons:
    """Long-running children by name."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: dict[str, int] = {}

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon; what it prints before it opens its own log goes to NAME.out."""
        if name in self._running:
            raise BootError(f"{name} is already running")
        with (self._log / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process.returncode = 0  # reap() waits for it, not Popen
        self._running[name] = process.pid

    def kill(self, name: str) -> None:
        """Kill a daemon."""
        pid = self._running.pop(name, 0)
        if not pid:
            raise BootError(f"{name} is not running")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def running(self) -> list[str]:
        """Return the names of the daemons that live."""
        return sorted(self._running)

    def reap(self) -> set[int]:
        """Reap every child that has ended; return their pids."""
        ended = set()
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                ended.add(pid)
        self._running = {n: p for n, p in self._running.items() if p not in ended}
        return ended

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon is ready; if it ends or takes too long, raise its last error."""
        log = self._log / f"{name}.out"
        deadline = time.monotonic() + _STEP_S
        while not ready():
            self.reap()
            if name not in self._running:
                raise BootError(f"{name} ended: {last_words(log)}")
            if time.monotonic() > deadline:
                raise BootError(f"{name} not ready in {_STEP_S} s: {last_words(log)}")
            time.sleep(_POLL_S)


def last_words(log: Path) -> str:
    """Return the error that a daemon ended with, from what it printed."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line]
        for word in ("fatal: ", "error: "):
            telling = [line for line in lines if word in line and not _NOISE.search(line)]
            if telling:
                return telling[-1].partition(word)[2]
        if lines:
            return lines[-1]
    return "no reason given"


def run(argv: Sequence[str]) -> str:
    """Run a short command and return its output, or raise BootError."""
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
        raise BootError(f"{' '.join(argv)}: no answer in {_STEP_S} s") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise BootError(f"{' '.join(argv)}: {words}")
    return done.stdout
