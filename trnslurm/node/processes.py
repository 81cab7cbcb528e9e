"""Owns how the node programs start, collect and end Linux processes without leaving one behind.

A subreaper adopts every orphan among its descendants. So a subreaper that has no child left has no
descendant left, even after a double fork, a session of their own, a parent killed under them.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

END_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
TERM_WAIT_S = 2.0
"""How long left-over descendants have between TERM and KILL."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCAN_INTERVAL_S = 0.05
_STDERR = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Stat(NamedTuple):
    """A process in /proc/PID/stat; start_ticks tells apart processes with the same pid."""

    state: str
    parent: int
    start_ticks: int


class SignalQueue:
    """Collects signals, ended children among them, behind a file descriptor to wait on.

    Handlers, not SIG_IGN: an ignored signal stays ignored over exec, and bash cannot trap it then.
    Only HUP stays ignored where it is: that is what nohup asks for.
    """

    def __init__(self) -> None:
        self._fd, wake_fd = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(wake_fd, False)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        for signum in (*heard_end_signals(), signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, _note)

    def wait(self, timeout_s: float | None, also: Sequence[int] = ()) -> tuple[set[int], bool]:
        """Wait; return the signals that came, and whether a descriptor of `also` is ready."""
        ready, _, _ = select.select([self._fd, *also], [], [], timeout_s)
        try:
            return set(os.read(self._fd, 4096)), any(fd in ready for fd in also)
        except BlockingIOError:
            return set(), any(fd in ready for fd in also)


def heard_end_signals() -> frozenset[signal.Signals]:
    """Return the signals that end this process: under nohup HUP is none of them."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return END_SIGNALS - {signal.SIGHUP} if ignored else END_SIGNALS


def die_with_parent(parent: int) -> None:
    """Have the kernel send TERM to this process when `parent`, its parent, dies.

    Linux means the parent's *thread* that started us: start these programs from a lasting thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGTERM)


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def spawn(
    command: Sequence[str],
    *,
    output_fd: int | None,
    environ: Mapping[str, str] = os.environ,
    own_session: bool = True,
) -> int:
    """Start a command in a new session, stdin empty, output appended; return its pid."""
    parent = os.getpid()
    # A signal that reached the child before its handlers are reset would be lost: hold it back.
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _exec(command, output_fd, environ, parent, own_session)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def reap() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: pid and exit code (128 + signal for a killed one)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, exit_code(status)


def exit_code(wait_status: int) -> int:
    """Return a wait status as a shell counts it."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def end_descendants(term_wait_s: float = TERM_WAIT_S) -> None:
    """TERM, later KILL, every descendant of this subreaper; return when none is left."""
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
    """Return the pids below this process, as far as one pass over /proc can tell."""
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
    """Return a process's entry in /proc; None if there is no such process (a zombie counts)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def say(text: str, log_fd: int | None = None) -> None:
    """Write a line to a log whose reader may be gone: no message is worth a broken clean-up."""
    with contextlib.suppress(OSError):
        os.write(
            _STDERR if log_fd is None else log_fd, f"{text}\n".encode(errors="surrogateescape")
        )


def open_log(path: str) -> int:
    """Open a log file to append to."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _exec(
    command: Sequence[str],
    output_fd: int | None,
    environ: Mapping[str, str],
    parent: int,
    own_session: bool,
) -> NoReturn:
    """Turn this forked child into the command."""
    try:
        if own_session:
            os.setsid()  # `kill 0` in a script then ends that script's group, not ours
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
    """Do nothing: the wake-up descriptor has the signal already."""
