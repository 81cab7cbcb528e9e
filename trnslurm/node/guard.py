"""Runs batch scripts one after another on this machine, and leaves no process behind.

    python -m trnslurm.node.guard --output 'logs/%s.log' -- precompile.sh train.sh

The caller may be killed, and may kill this program without time to clean up: submitit's local
controller signals only its direct child, with SIGINT and, a second later, SIGKILL. So there are two
processes:

- the waiter, the caller's child: it ends when its parent dies, and returns the exit code;
- the supervisor, in a separate session: it runs the scripts, adopts the processes that they leave
  behind, and ends everything when its pipe from the waiter closes or the watched process has ended.

If the supervisor itself is killed, the waiter adopts its descendants and ends them. At the end,
only the running script gets SIGTERM first, so that it can record the reason, which is in a file of
its run. The waiter sends the number of the signal that asks for the end. It sends none if it or its
parent is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trnslurm.contract.files import write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.node import processes

ENDED = 128 + signal.SIGTERM
_BY_KILL = 128 + signal.SIGKILL
POLL_S = 0.5
_KILLED = "the process that guards the run was killed"
RETRIED_BY_SUBMITIT = 144  # its local controller would start the program again, up to six times


class Watched:
    """A process whose end also ends this program, identified by pid and start time."""

    def __init__(self, pid: int) -> None:
        stat, own = processes.read_stat(pid), processes.read_stat(os.getpid())
        # It started this program, so it is older. A younger process has the pid of a dead one.
        self._known = stat is not None and own is not None and stat.start_ticks <= own.start_ticks
        self._start_ticks = stat.start_ticks if stat else 0
        self.pid = pid
        self.fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3, or not permitted
            self.fd = os.pidfd_open(pid)

    def gone(self) -> bool:
        """Check whether the process has ended. A zombie counts as ended."""
        stat = processes.read_stat(self.pid)
        return (
            not self._known
            or stat is None
            or stat.state in "ZX"
            or stat.start_ticks != self._start_ticks
        )

    def ends_within(self, seconds: float) -> bool:
        """Wait for the process to end; return whether it did."""
        end = time.monotonic() + seconds
        fds = [] if self.fd is None else [self.fd]
        while not self.gone() and (left_s := end - time.monotonic()) > 0:
            select.select(fds, [], [], left_s if fds else min(left_s, POLL_S))
        return self.gone()


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
        """Wait until something happens. `cut` then contains the reason to end, if there is one."""
        if self.cut:
            self._signals.wait(timeout_s)
            return
        if self._watched and self._watched.gone():
            timeout_s = 0
        elif timeout_s is None:
            timeout_s = self._poll_s
        arrived, closed = self._signals.wait(timeout_s, self._fds)
        if self._watched and self._watched.gone():
            self.cut = f"process {self._watched.pid}, which this run belongs to, has ended"
        elif closed:
            asked_by = os.read(self._fds[0], 1)
            self.cut = f"asked to end by {_name(asked_by[0])}" if asked_by else _KILLED
        elif asked := arrived & processes.END_SIGNALS:
            self.cut = _name(min(asked))


def _name(signum: int) -> str:
    return signal.Signals(signum).name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts; return the exit code of the first one that fails, or 0."""
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
        # The waiter is now the only writer: at end of file it has ended or asks for the end.
        become_supervisor(options, waiter_end, watched)
    os.close(waiter_end)
    code = wait_for(supervisor, supervisor_end, signals, parent)
    if code == _BY_KILL:
        for script in options.scripts:
            note_end(script, _KILLED)
    processes.end_descendants(options.grace)
    return 1 if code == RETRIED_BY_SUBMITIT else code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="guard", usage="%(prog)s [options] -- SCRIPT.sh [SCRIPT2.sh ...]"
    )
    parser.add_argument("--watch-pid", type=int, help="end when this process, the launcher, ends")
    parser.add_argument("--behind", metavar="PID@START", help="start when this process has ended")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="seconds that a script has to end after SIGTERM"
    )
    parser.add_argument(
        "--output", help="log file to append to, from the script's directory; %%s is its stem"
    )
    parser.add_argument(
        "scripts", nargs="+", help="bash scripts; if one fails, the rest do not run"
    )
    return parser.parse_args(argv)


def wait_for(
    supervisor: int, supervisor_end: int, signals: processes.SignalQueue, parent: int
) -> int:
    """Wait for the supervisor. Let it end everything when a signal asks for that."""
    ended_by = 0
    while True:
        arrived, _ = signals.wait(None)
        asked = arrived & processes.END_SIGNALS
        if asked and not ended_by:
            ended_by = min(asked)
            if os.getppid() == parent:
                os.write(supervisor_end, bytes([ended_by]))
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
            os._exit(code)  # never returns to the waiter's code


def run_scripts(options: argparse.Namespace, lifeline: Lifeline) -> int:
    """Run the scripts until one fails or the lifeline is cut."""
    while options.behind and still_runs(options.behind) and not lifeline.cut:
        lifeline.wait(POLL_S)
    for script in options.scripts:
        with contextlib.suppress(OSError):
            RunFiles(Path(script).parent).guard_file.unlink()
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


def note_end(script: str, why: str) -> None:
    """Write why a script's run is being ended, for its attempt."""
    with contextlib.suppress(OSError):
        write_json(RunFiles(Path(script).parent).guard_file, {"why": why})


def still_runs(process: str) -> bool:
    """Check whether a process, given as PID@START, is still running."""
    pid, _, start_ticks = process.partition("@")
    stat = processes.read_stat(int(pid))
    return stat is not None and stat.state not in "ZX" and str(stat.start_ticks) == start_ticks


def run_script(script: str, log_fd: int | None, grace_s: float, lifeline: Lifeline) -> int:
    """Run one script. When the lifeline is cut, send SIGTERM, and wait `grace_s` for its end."""
    pid = processes.spawn(["bash", "--", script], output_fd=log_fd)
    deadline: float | None = None
    while True:
        code = dict(processes.reap()).get(pid)
        if code is not None:
            return ENDED if lifeline.cut else code
        if lifeline.cut and deadline is None:
            note_end(script, lifeline.cut)
            processes.say(f"guard: ending {script}: {lifeline.cut}", log_fd)
            processes.send(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        elif deadline and time.monotonic() >= deadline:
            return ENDED
        lifeline.wait(max(0.0, deadline - time.monotonic()) if deadline else None)


if __name__ == "__main__":
    sys.exit(main())
