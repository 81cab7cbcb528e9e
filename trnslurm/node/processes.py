"""Starts, reaps and ends processes for the node programs, and leaves none behind.

A subreaper adopts every orphan among its descendants. So a subreaper without children has no
descendants left, even after double forks, new sessions and killed parents.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

END_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
TERM_WAIT_S = 2.0
"""How long left-over descendants have between SIGTERM and SIGKILL."""
KILL_WAIT_S = 30.0
"""How long workers have, as with torchrun (PContext.close in multiprocessing/api.py)."""
_TOOL_S = 20.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCAN_INTERVAL_S = 0.05
_STDERR = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Stat(NamedTuple):
    """A process in /proc/PID/stat. start_ticks distinguishes processes with the same pid."""

    state: str
    parent: int
    start_ticks: int


class SignalQueue:
    """Collects signals, including SIGCHLD, so that a program can wait for them.

    It installs handlers instead of SIG_IGN, because bash cannot trap a signal that it inherits as
    ignored. An ignored SIGHUP stays ignored, as nohup requires.
    """

    def __init__(self) -> None:
        self._fd, wake_fd = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(wake_fd, False)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        for signum in (*heard_end_signals(), signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, _note)

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> tuple[set[int], bool]:
        """Wait; return the signals that arrived, and whether a descriptor in `also` is ready."""
        ready, _, _ = select.select([self._fd, *also], [], [], timeout_s)
        try:
            return set(os.read(self._fd, 4096)), any(fd in ready for fd in also)
        except BlockingIOError:
            return set(), any(fd in ready for fd in also)


def heard_end_signals() -> frozenset[signal.Signals]:
    """Return the signals that end this process; under nohup, SIGHUP is not among them."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return END_SIGNALS - {signal.SIGHUP} if ignored else END_SIGNALS


@contextlib.contextmanager
def handling(signals: Iterable[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle these signals within the block."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def die_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when `parent`, its parent, dies.

    To Linux, the parent is the thread that started this process, so that thread must not end early.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def spawn(
    command: Sequence[str],
    *,
    input_fd: int | None = None,
    output_fd: int | None = None,
    environ: Mapping[str, str] = os.environ,
    own_session: bool = True,
    ignored: frozenset[int] = frozenset(),
) -> int:
    """Start a command in a new session with empty stdin, and append its output; return its pid.

    The command starts with the default action for each signal, except for the ignored ones.
    """
    parent = os.getpid()
    # A signal that reaches the child before its handlers are reset would be lost: block all.
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _exec(command, (input_fd, output_fd), environ, parent, own_session, ignored)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def start_group(command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a command in its own process group, in this session."""
    # Popen's process_group is new in Python 3.11.
    own: dict[str, Any] = {"preexec_fn": os.setpgrp}
    if sys.version_info >= (3, 11):
        own = {"process_group": 0}
    child: subprocess.Popen[bytes] = subprocess.Popen(command, **own, **streams)
    return child


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and exit code of each child that has ended (128 + signal if it was killed)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, exit_code(status)


def exit_code(wait_status: int) -> int:
    """Return the exit code that a shell shows for a wait status."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def end_descendants(term_wait_s: float = TERM_WAIT_S) -> None:
    """Send SIGTERM, later SIGKILL, to all descendants of this subreaper until none is left."""
    deadline = time.monotonic() + term_wait_s
    told: set[int] = set()
    while _has_children():
        if time.monotonic() >= deadline:
            for pid in descendants():
                send(pid, signal.SIGKILL)
        else:
            new = [pid for pid in descendants() if pid not in told]
            for pid in new:
                send(pid, signal.SIGTERM)
            told.update(new)
        time.sleep(_SCAN_INTERVAL_S)


def descendants() -> list[int]:
    """Return the pids of this process's descendants, as found in one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))):
            children.setdefault(stat.parent, []).append(int(entry.name))
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        below = children.pop(parents.pop(), [])
        found += below
        parents += below
    return found


def read_stat(pid: int) -> Stat | None:
    """Return a process's entry in /proc, or None if it does not exist. A zombie counts."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may itself contain blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def say(text: str, log_fd: int | None = None) -> None:
    """Write a line to a log. A log whose reader has gone must not stop a clean-up."""
    with contextlib.suppress(OSError):
        os.write(
            _STDERR if log_fd is None else log_fd, f"{text}\n".encode(errors="surrogateescape")
        )


def open_log(path: str) -> int:
    """Open a log file to append to."""
    # Without O_NONBLOCK, opening a pipe of this name would block.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o666)
    os.set_blocking(fd, True)
    return fd


def ask_tool(*command: str, limit_s: float = _TOOL_S) -> tuple[int | None, str]:
    """Return a tool's exit code and output; the code is None if the tool is not installed."""
    if not shutil.which(command[0]):
        return None, ""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {limit_s:g} s"
    return done.returncode, done.stdout or done.stderr


def last_line(text: str) -> str:
    """Return the last line that a tool printed, truncated to 200 characters."""
    return (text.strip().splitlines() or ["it printed nothing"])[-1][:200]


def _exec(
    command: Sequence[str],
    given: tuple[int | None, int | None],
    environ: Mapping[str, str],
    parent: int,
    own_session: bool,
    ignored: frozenset[int],
) -> NoReturn:
    """Turn this forked child into the command."""
    try:
        if own_session:
            os.setsid()  # then `kill 0` in a script ends only that script's group
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)
        input_fd, output_fd = given
        os.dup2(os.open(os.devnull, os.O_RDONLY) if input_fd is None else input_fd, 0)
        if output_fd is not None:
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        say(f"error: cannot run {command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def _has_children() -> bool:
    for _ in reap():
        pass
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0))) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def _note(_signum: int, _frame: object) -> None:
    """Do nothing, because the wake-up descriptor receives the signal."""
