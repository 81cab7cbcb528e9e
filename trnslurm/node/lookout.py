"""Watches one node's processes for a hang. node.sh starts it before the workers:

    (python -m trnslurm.node.lookout --task=$$ --minutes=30 &)

While the node works, it writes nothing. If the node's processes have done no computing, or no I/O,
for a while, it reports for how long in state/still-….json. hang.py, on the first node, compares all
nodes. When that program finds a hang, this one writes the stacks of all processes to the node's
log, and each worker's activity to state/stacks-….json. When hang.py has named the workers that hold
up the others, this program kills the node's processes. It ends when its task, the process of
node.sh, ends.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract.files import write_json
from trnslurm.contract.variables import Variable
from trnslurm.devices import DEVICES
from trnslurm.node import first, processes
from trnslurm.node.accelerators.accelerator import accelerator_of
from trnslurm.node.beats import Sender
from trnslurm.node.guard import Watched
from trnslurm.node.stacks import (
    ALL_STACKS_S,
    Process,
    facts_of,
    name_of,
    processes_with,
    stacks_of,
    what_is,
    workers_of,
)
from trnslurm.node.state import RUN

MOST_PERIOD_S = 10.0
# A node reports after this share of the time without progress that makes a hang.
_REPORTS_AT = 0.25
# What an idle process may use for polling loops and threads that send heartbeats.
_IDLE_CPU_SHARE = 0.02
_LEAST_CPU_S = 0.05
_IDLE_BYTES_PER_S = 64 << 10
_FAULT_BYTES = 128 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Programs that wait while their processes compute where this program cannot see them.
_ELSEWHERE = {"docker", "kubectl", "podman", "ssh"}
_SLURM_NODE = "SLURMD_NODENAME"  # of every task: setup_env in slurmstepd_job.c


def main() -> int:
    """Watch until the task ends."""
    parser = argparse.ArgumentParser(prog="lookout", allow_abbrev=False)
    parser.add_argument("--task", type=int, required=True, help="the process of node.sh")
    parser.add_argument("--minutes", type=float, required=True, help="minutes until a hang")
    options = parser.parse_args()
    Lookout(options.task, 60 * options.minutes).watch()
    return 0


def period_of(limit_s: float) -> float:
    """Return how often to look for a hang of this length."""
    return min(MOST_PERIOD_S, max(1.0, limit_s / 30))


def own_processes() -> list[Process]:
    """Return the attempt's processes on this node, found by the variables that they inherit.

    A script may start tasks on all nodes with its own srun. These have their node's name from
    Slurm, but the node number of the script. The programs next to the script have no node number.
    """
    names = (Variable.PHASE, Variable.ATTEMPT, Variable.RUN_DIR, _SLURM_NODE)
    wanted = (f"{name}={os.environ[name]}".encode() for name in names)
    return processes_with(wanted, also=Variable.NODE.encode())


def tasks_in(running: list[Process]) -> list[Process]:
    """Return the processes that the script's own srun has started."""
    return [p for p in running if p.step not in ("", os.environ.get("SLURM_STEP_ID"))]


def _are_elsewhere(running: list[Process]) -> bool:
    """Check whether the node's processes wait for others that this program cannot see."""
    names = {p.pid: name_of(p.pid) for p in running}
    if _ELSEWHERE & {*names.values()}:
        return True
    # srun has a child of the same name. Its tasks lack our variables with --export=NONE.
    own = [p for p in running if names[p.pid] == "srun" and names.get(p.parent) != "srun"]
    return len(own) > len({p.step for p in tasks_in(running)})


class Use(NamedTuple):
    """The resources that a process has used since it started."""

    cpu_s: float
    read_and_written: int


def use_of(pid: int) -> Use | None:
    """Return the resources that a process has used, or None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        io = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except OSError:
        return None
    # utime and stime, fields 14 and 15 of proc_pid_stat(5); rchar and wchar of proc_pid_io(5).
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    moved = sum(int(n) for n in re.findall(r"^[rw]char: (\d+)$", io, re.M))
    # Field 12: a page of a mapped file, such as a library, that came from a disk, with others.
    return Use(cpu_s, moved + int(fields[9]) * _FAULT_BYTES)


class Activity:
    """How long the node's processes have done no computing and no I/O."""

    def __init__(self) -> None:
        self.idle_s = self.quiet_s = 0.0
        self._at = time.monotonic()
        self._used: dict[int, Use] = {}
        # The device may compute while its processes wait for it.
        self._accelerator = accelerator_of(DEVICES.get(os.environ.get(Variable.DEVICE, "")))

    def look(self, running: list[Process]) -> None:
        """Compare the processes' resource use with the last time."""
        now = time.monotonic()
        passed_s, self._at = now - self._at, now
        used = {p.pid: use for p in running if (use := use_of(p.pid))}
        zero = Use(0.0, 0)
        before = [self._used.get(pid, zero) for pid in used]
        cpu_s = sum(use.cpu_s for use in used.values()) - sum(use.cpu_s for use in before)
        moved = sum(u.read_and_written for u in used.values())
        moved -= sum(u.read_and_written for u in before)
        self._used = used
        quiet = moved <= _IDLE_BYTES_PER_S * passed_s
        idle = quiet and cpu_s <= _IDLE_CPU_SHARE * len(used) * passed_s + _LEAST_CPU_S
        self.quiet_s = self.quiet_s + passed_s if quiet else 0.0
        busy = _are_elsewhere(running) or self._accelerator.works()
        self.idle_s = self.idle_s + passed_s if idle and not busy else 0.0


class Lookout:
    """The lookout on one node."""

    def __init__(self, task: int, limit_s: float) -> None:
        self._task = Watched(task)
        self._limit_s = limit_s
        self._node, self._phase = int(os.environ[Variable.NODE]), os.environ[Variable.PHASE]
        self._attempt = int(os.environ[Variable.ATTEMPT])
        self._activity = Activity()
        self._reported = self._asked = False
        self._beats = Sender(self._attempt, self._node) if Variable.BEATS in os.environ else None
        self._patience_s = first.patience_s(self._node) if self._beats else math.inf

    def watch(self) -> None:
        """Look every few seconds until the task ends."""
        period_s = period_of(self._limit_s)
        # A standby step has no attempt yet. Its waiting is not a hang.
        while not RUN.state_file(self._phase, self._attempt).exists():
            if self._task_ends_within(period_s):
                return
        while not self._task_ends_within(1.0 if self._asked else period_s):
            running = own_processes()
            if self._asked:
                self._kill_if_told(running)
                continue
            self._activity.look(running)
            self._report()
            if self._reported and self._is_there(RUN.hang_file(self._phase, self._attempt)):
                self._asked = True
                tasks = tasks_in(running)
                if not any(p.rank is not None for p in running):
                    running = [p._replace(rank=p.task) if p in tasks else p for p in running]
                write_json(
                    RUN.stacks_file(self._phase, self._attempt, self._node),
                    {"workers": list(self._stacks(running)), "by_srun": bool(tasks)},
                )

    def _task_ends_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        fds = [fd for fd in (self._task.fd, self._beats) if fd is not None]
        while not self._task.gone() and (left_s := end - time.monotonic()) > 0:
            if self._beats:
                left_s = min(left_s, self._beats.send_if_due())
            select.select(fds, [], [], left_s if self._task.fd is not None else 0.2)
            if self._beats and self._beats.told_to_end():
                self._end(self._beats)
            self._look_after_first()
        return self._task.gone()

    def _look_after_first(self) -> None:
        """Requeue the job if its first node is lost. Otherwise check again after the same delay."""
        begun = RUN.state_file(self._phase, self._attempt).exists()  # it may be on standby
        if self._beats and begun and self._beats.silent_s >= self._patience_s:
            self._patience_s += first.patience_s(self._node)
            if not first.is_missed():  # Slurm ends the job with it
                self._patience_s = math.inf
            else:
                first.requeue_if_lost(self._phase, self._attempt)

    def _report(self) -> None:
        """When the node has been still for long, write for how long, until it works again."""
        activity = self._activity
        still_s = max(activity.idle_s, activity.quiet_s)
        still = still_s >= _REPORTS_AT * self._limit_s
        if still or self._reported:
            facts = {"idle_s": round(activity.idle_s, 1), "quiet_s": round(activity.quiet_s, 1)}
            with suppress(OSError):
                write_json(RUN.still_file(self._phase, self._attempt, self._node), facts)
        self._reported = still

    def _is_there(self, file: Path) -> bool:
        # The directory is listed: NFS may answer from memory for a single file.
        with suppress(OSError):
            return file.name in os.listdir(file.parent)  # noqa: PTH208
        return False

    def _kill_if_told(self, running: list[Process]) -> None:
        if self._is_there(RUN.stuck_file(self._phase, self._attempt)):
            self._kill(running)

    def _end(self, beats: Sender) -> None:
        """Kill the node's processes, and report when they are gone.

        The task is the last process, because with it Slurm kills this program.
        """
        processes.send(self._task.pid, signal.SIGSTOP)
        while others := [p for p in own_processes() if p.pid != self._task.pid]:
            for process in others:
                processes.send(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        beats.say_ended()
        processes.send(self._task.pid, signal.SIGKILL)

    def _kill(self, running: list[Process]) -> None:
        # The launcher first, so that it does not report the ends of its workers.
        processes.send(self._task.pid, signal.SIGKILL)
        for process in running:
            processes.send(process.pid, signal.SIGKILL)

    def _stacks(self, running: list[Process]) -> Iterator[dict[str, Any]]:
        """Write the stacks of all processes to the log; yield what each worker does."""
        host = os.uname().nodename
        running = [p for p in running if p.rank is not None] or running  # without the launcher
        until = time.monotonic() + ALL_STACKS_S
        texts = {p.pid: "" if p.state in "Tt" else stacks_of(p.pid, until) for p in running}
        workers = workers_of([p for p in running if texts[p.pid]], workers_of(running))
        if self._phase == "precompile" and not any(p.rank is not None for p in running):
            parents = {p.parent for p in running}  # the compiler is the innermost process
            workers = [p for p in running if p.pid not in parents][:1]
        for process in sorted(running, key=lambda p: (p not in workers, p.rank or 0)):
            text = texts[process.pid]
            who = f"process {process.pid}"
            if process in workers and process.rank is not None:
                who = f"worker {process.rank}"
            head = f"no progress: stacks of {who} (node {self._node}, {host}), {what_is(process)}"
            processes.say(f"{head}\n{text or '  it wrote no stacks'}")
            if process in workers:
                yield facts_of(process, text)


if __name__ == "__main__":
    sys.exit(main())
