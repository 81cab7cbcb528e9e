"""Runs batch scripts one after another here, and leaves no process behind.

    python -m trnslurm.node.guard --output 'logs/%s.log' -- precompile.sh train.sh

The caller may be killed, and may kill us, with no time to clean up: submitit's local controller
signals its direct child only, INT and a second later KILL. Hence two processes:

- the waiter, which the caller sees: it ends when its parent dies, and returns the exit code;
- the supervisor, in a separate session: it runs the scripts, adopts what they leave behind, and
  ends everything when its pipe from the waiter closes or when the watched process is gone.

Should the supervisor itself be killed, its descendants fall to the waiter, which ends them.
The running script is told first and alone (TERM), so that its trap can write down what happened.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trnslurm.node import processes

ENDED = 128 + signal.SIGTERM
POLL_S = 0.5
RETRIED_BY_SUBMITIT = 144  # its local controller would start us again, up to six times


class Watched:
    """A process whose end is ours: known by pid and start time, as pids are used again."""

    def __init__(self, pid: int) -> None:
        stat, own = processes.read_stat(pid), processes.read_stat(os.getpid())
        # It asked for us, so it is not younger than we are: one that is took over a dead one's pid.
        self._known = stat is not None and own is not None and stat.start_ticks <= own.start_ticks
        self._start_ticks = stat.start_ticks if stat else 0
        self.pid = pid
        self.fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3, or in a strict jail
            self.fd = os.pidfd_open(pid)

    def gone(self) -> bool:
        """Return whether the process has ended; a zombie has."""
        stat = processes.read_stat(self.pid)
        return (
            not self._known
            or stat is None
            or stat.state in "ZX"
            or stat.start_ticks != self._start_ticks
        )


class Lifeline:
    """Tells the supervisor when to end everything, and why."""

    def __init__(self, waiter_fd: int, watched: Watched | None) -> None:
        self._signals = processes.SignalQueue()
        self._watched = watched
        self._fds = [waiter_fd]
        self._poll_s: float | None = None
        if watched and watched.fd is not None:
            self._fds.append(watched.fd)
        elif watched:
            self._poll_s = POLL_S
        self.cut: str | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when something happened; `cut` then gives the reason to end, if there is one."""
        if self.cut:
            self._signals.wait(timeout_s)
            return
        if self._watched and self._watched.gone():
            timeout_s = 0
        elif timeout_s is None:
            timeout_s = self._poll_s
        arrived, closed = self._signals.wait(timeout_s, self._fds)
        if self._watched and self._watched.gone():
            self.cut = f"process {self._watched.pid}, which this run belongs to, is gone"
        elif closed:
            self.cut = "asked to end"
        elif asked := arrived & processes.END_SIGNALS:
            self.cut = f"signal {min(asked)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts; return the first failing one's exit code, or 0."""
    parent = os.getppid()
    signals = processes.SignalQueue()
    options = parse(argv)
    processes.die_with_parent(parent)
    processes.become_subreaper()
    watched = Watched(options.watch_pid) if options.watch_pid else None
    waiter_end, supervisor_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(supervisor_end)
        # The only writer is now the waiter: end of file means that it is gone or wants the end.
        become_supervisor(options, waiter_end, watched)
    os.close(waiter_end)
    code = wait_for(supervisor, supervisor_end, signals)
    processes.end_descendants(options.grace)
    return 1 if code == RETRIED_BY_SUBMITIT else code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="guard", usage="%(prog)s [options] -- SCRIPT.sh [SCRIPT2.sh ...]"
    )
    parser.add_argument("--watch-pid", type=int, help="end when this process, the launcher, ends")
    parser.add_argument("--behind", metavar="PID@START", help="begin when this process has ended")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds that a script has to end after TERM"
    )
    parser.add_argument(
        "--output", help="log file to append to, from the script's directory; %%s is its stem"
    )
    parser.add_argument("scripts", nargs="+", help="bash scripts; the first to fail is the last")
    return parser.parse_args(argv)


def wait_for(supervisor: int, supervisor_end: int, signals: processes.SignalQueue) -> int:
    """Wait for the supervisor; have it end everything when a signal asks for that."""
    ended_by = 0
    while True:
        arrived, _ = signals.wait(None)
        asked = arrived & processes.END_SIGNALS
        if asked and not ended_by:
            ended_by = min(asked)
            os.close(supervisor_end)
        pid, status = os.waitpid(supervisor, os.WNOHANG)
        if pid:
            return 128 + ended_by if ended_by else processes.exit_code(status)


def become_supervisor(
    options: argparse.Namespace, waiter_end: int, watched: Watched | None
) -> NoReturn:
    """Run the scripts in this forked child, and exit."""
    code = 1
    try:
        os.setsid()
        processes.become_subreaper()
        lifeline = Lifeline(waiter_end, watched)
        code = run_scripts(options, lifeline)
    except OSError as error:
        processes.say(f"error: guard: {error}")
    except BaseException:
        processes.say(traceback.format_exc())
    finally:
        try:
            processes.end_descendants()
        finally:
            os._exit(code)  # never back into the waiter's code


def run_scripts(options: argparse.Namespace, lifeline: Lifeline) -> int:
    """Run the scripts until one fails or the lifeline is cut."""
    while options.behind and still_runs(options.behind) and not lifeline.cut:
        lifeline.wait(POLL_S)
    for script in options.scripts:
        lifeline.wait(0)
        if lifeline.cut:
            processes.say(f"guard: {script} not started: {lifeline.cut}")
            return ENDED
        log_fd = None
        if options.output:
            name = options.output.replace("%s", Path(script).stem)
            log_fd = processes.open_log(str(Path(script).parent / name))
        code = run_script(script, log_fd, options.grace, lifeline)
        processes.end_descendants()
        if log_fd is not None:
            os.close(log_fd)
        if code != 0:
            return code
    return 0


def still_runs(process: str) -> bool:
    """Check whether a process, written as PID@START, has not ended."""
    pid, _, start_ticks = process.partition("@")
    stat = processes.read_stat(int(pid))
    return stat is not None and stat.state not in "ZX" and str(stat.start_ticks) == start_ticks


def run_script(script: str, log_fd: int | None, grace_s: float, lifeline: Lifeline) -> int:
    """Run one script; once the lifeline is cut, tell it and give it `grace_s` to end."""
    pid = processes.spawn(["bash", "--", script], output_fd=log_fd)
    deadline: float | None = None
    while True:
        code = dict(processes.reap()).get(pid)
        if code is not None:
            return ENDED if lifeline.cut else code
        if lifeline.cut and deadline is None:
            processes.say(f"guard: ending {script}: {lifeline.cut}", log_fd)
            processes.send(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        elif deadline and time.monotonic() >= deadline:
            return ENDED
        lifeline.wait(max(0.0, deadline - time.monotonic()) if deadline else None)


if __name__ == "__main__":
    sys.exit(main())
