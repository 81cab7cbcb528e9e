"""Run a command; when it ends, or is interrupted, end everything that it has started.

    python tests/supervise.py pytest …

A test ends what it started. But a run of tests that is interrupted, or whose worker dies, would
leave servers, trainings and whole sandboxes behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 20
"""How long a sandbox or a server may take to end by itself."""


def main() -> int:
    """Run the command; return its exit code, as a shell does."""
    # Orphans become children of this process, which collects them as init does.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A group of its own: Ctrl-C reaches it once, from here.
    command = subprocess.Popen(sys.argv[1:], process_group=0)

    def interrupt(number: int, frame: object) -> None:
        # After SIGINT alone does pytest end its tests and their fixtures.
        os.killpg(command.pid, signal.SIGINT)

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
            signal.signal(number, interrupt)
    code = _collect(command.pid)
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    left = _descendants()
    for pid in left:
        print(f"left behind: {pid} {_words(pid)}", file=sys.stderr)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while left:
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants()
    return code


def _collect(pid: int) -> int:
    """Wait for a process, and for every orphan until then; return the process's exit code."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode()
    return ""


def _descendants() -> list[int]:
    """Return the processes below this one, zombies too."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


if __name__ == "__main__":
    sys.exit(main())
