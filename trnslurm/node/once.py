"""Runs a command on the first node only, as sbatch runs a batch script, while the others wait.

With --given, the command gets the environment in which the job was submitted, as saved by the batch
script, and this run's variables. Its own srun then starts job steps.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from trnslurm.contract.files import open_file
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.node import processes

_LOOK_S = 1.0
_BROKEN_S = 5.0
_TAIL_BYTES = 64 << 10
# The words are from _task_finish in srun's task_state, and from strsignal(3).
_TASK_FAILED = re.compile(r"(?m)^srun: error: ([\w.-]+): (tasks? [\d,-]+): ([A-Z][\w ()]+)$")
_FAILED = 1
# Variables that a step has, but a batch script does not.
_OF_THE_JOB = ("SLURM_CONF", "SLURM_JOB", "SLURM_GPUS", "SLURM_NNODES", "SLURM_CLUSTER")
_FIRST = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


class Meets(Protocol):
    """The launchers on the other nodes."""

    number: int

    def leave(self, broken: Callable[[], bool] | None = None) -> bool:
        """Leave together with them; return False if `broken` returns True first."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a batch script's options."""
    parser.add_argument("--given", action="store_true", help="give it the submitter's environment")
    parser.add_argument("--keep", default="", metavar="NAME,…", help="keep these variables as well")
    parser.add_argument("--directory", default=".", help="its directory, below work/ or absolute")
    parser.add_argument("--array", default="", metavar="N,…", help="the indices of its job array")
    parser.add_argument("--task", default="", metavar="N", help="this task's index among these")
    parser.add_argument("--signal", default="", help="as in #SBATCH --signal, but without the time")


class Once:
    """A command that runs on the first node and may start tasks on all nodes."""

    def __init__(self, nodes: Meets, command: Sequence[str], options: argparse.Namespace) -> None:
        self._nodes, self._command, self._options = nodes, [*command], options
        self._signals = processes.SignalQueue()

    def run(self) -> int:
        """Run the command here, or wait until it has ended; return the exit code."""
        code = 0 if self._nodes.number else self._run_here()
        if code == 0:
            for signum in processes.heard_end_signals():
                signal.signal(signum, lambda *_: os._exit(_FAILED))
            self._nodes.leave()
        return code

    def _run_here(self, more: Mapping[str, str] | None = None) -> int:
        environ = {**_as_batch_script(os.environ), **(more or {})}
        if self._options.given:
            environ = given_environment(os.environ, self._options.keep.split(","))
            self._command[0] = str(Path(self._command[0]).absolute())
            os.chdir(self._options.directory)
            environ |= dict.fromkeys(("PWD", "SLURM_SUBMIT_DIR"), str(Path.cwd()))
        if self._options.task:
            environ |= _task_of_array(environ, self._options.task, self._options.array)
        return self._run_command(self._command, environ)

    def _run_command(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a command, and pass signals on to it; return its exit code."""
        pid = processes.spawn(command, environ=environ)
        wish = Wish(self._options.signal)
        deadline: float | None = None
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            within_s = deadline and max(0.0, deadline - time.monotonic())
            arrived, _ = self._signals.wait(_LOOK_S if wish.open else within_s)
            if ending := arrived & processes.END_SIGNALS:
                processes.send(pid, signal.Signals(min(ending)))
                deadline = deadline or time.monotonic() + processes.KILL_WAIT_S
            if deadline is None and self._is_broken():
                processes.send(pid, signal.SIGTERM)
                deadline = time.monotonic() + _BROKEN_S
            if deadline and time.monotonic() >= deadline:
                processes.send(pid, signal.SIGKILL)
                deadline = None
            wish.look(pid)
        return processes.exit_code(ended[1])

    def _is_broken(self) -> bool:
        """Check whether anything has failed that the command needs to continue."""
        return False


class Wish:
    """The signal that a batch script requests before its time limit; Slurm sends it to trnslurm."""

    def __init__(self, text: str) -> None:
        to, _, name = text.rpartition(":")
        self._alone = "B" in to  # otherwise the steps get it
        self._signum = _number(name) if text else None
        files = RunFiles(Path(os.environ[Variable.RUN_DIR]))
        self._asked = files.stop_file("train", int(os.environ[Variable.ATTEMPT]))

    @property
    def open(self) -> bool:
        """Whether the script is still waiting for the signal."""
        return self._signum is not None

    def look(self, pid: int) -> None:
        """Send the signal when the run is asked to stop."""
        if self._signum is None or not self._asked.exists():
            return
        to = [pid] if self._alone else [p for p in processes.descendants() if p != pid]
        processes.say(f"trnslurm: {signal.Signals(self._signum).name} for the batch script")
        for one in to:
            processes.send(one, self._signum)
        self._signum = None


def given_environment(environ: Mapping[str, str], keep: Sequence[str]) -> dict[str, str]:
    """Return the environment in which the job was submitted, with this run's variables."""
    raw = base64.b64decode(environ[Variable.GIVEN]).decode(errors="surrogateescape")
    found = dict(line.split("=", 1) for line in raw.split("\0") if "=" in line)
    run = {k: v for k, v in environ.items() if k.startswith(("TRNSLURM_", "WANDB_")) or k in keep}
    run.pop(Variable.GIVEN, None)
    paths = (environ.get("PYTHONPATH"), found.get("PYTHONPATH"))
    run["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Slurm's commands, if they were not on the submitter's PATH.
    found["PATH"] = os.pathsep.join(filter(None, (found.get("PATH"), environ.get("PATH"))))
    found.pop("SLURM_OPEN_MODE", None)  # also for srun, and from a line that is not in the script
    found |= {name: environ[name] for name in ("SLURMD_NODENAME",) if name in environ}
    return found | run | {"PYTHONUNBUFFERED": "1"}


def went_on(log: Path) -> str:
    """Return a message if a batch script continued after its own srun failed, or ""."""
    with suppress(OSError), open_file(log) as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        said = [*_TASK_FAILED.finditer(stream.read().decode(errors="replace"))]
        if said:
            host, task, what = said[0].groups()
            return f"its srun failed, but the script continued: {task} on {host}: {what}"
    return ""


def _as_batch_script(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without this step's variables, so that srun starts job steps."""
    found = {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or name.startswith(_OF_THE_JOB)
    }
    return found | _FIRST


def _task_of_array(environ: Mapping[str, str], task: str, array: str) -> dict[str, str]:
    """Return the variables that sbatch sets in a job array. Slurm's own index is the index of the
    sweep's run."""
    tasks = sorted(map(int, array.split(",")))
    gaps = [after - before for before, after in zip(tasks, tasks[1:])]
    return {
        "SLURM_ARRAY_JOB_ID": environ.get("SLURM_ARRAY_JOB_ID", environ.get("SLURM_JOB_ID", "")),
        "SLURM_ARRAY_TASK_ID": task,
        "SLURM_ARRAY_TASK_COUNT": str(len(tasks)),
        "SLURM_ARRAY_TASK_MIN": str(min(tasks)),
        "SLURM_ARRAY_TASK_MAX": str(max(tasks)),
        "SLURM_ARRAY_TASK_STEP": str(min(gaps, default=1)),
    }


def _number(name: str) -> int:
    """Return a signal's number. Its name may lack SIG."""
    if name.isdecimal():
        return int(name)
    return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
