"""Starts runs on this machine: submitit's LocalExecutor with one task, which guards our scripts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import submitit
from submitit.local import local
from submitit.local.local import LocalExecutor

from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.records.run import RunDir, process_start
from trnslurm.schedulers.interface import WaitsFor

# Variables that a local run gets from this shell; its script sets all others.
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",  # which GPUs the user may use
)
_SUBMITIT = str(Path(submitit.__file__).parent.parent)
_NO_LIMIT_MIN = 10 * 365 * 24 * 60  # submitit's own default is two minutes
_STOP_S = 45  # the guard gives the script and its nodes less than this


class GuardedLocal(LocalExecutor):
    """Runs one task with a command of ours."""

    def start(self, argv: Sequence[str]) -> int:
        """Start the task in a separate session, and return the pid of its controller.

        In its own session, the task survives Ctrl-C and the end of a notebook's kernel, which kills
        the kernel's process group. It holds none of our pipes open. submitit has no option for
        that.
        """
        module: Any = local
        self.update_parameters(timeout_min=_NO_LIMIT_MIN)
        with (Path(self.folder) / "controller.log").open("ab") as log:

            def popen(
                argv: Sequence[str], *, shell: bool, env: Mapping[str, str]
            ) -> subprocess.Popen[bytes]:
                process = subprocess.Popen(
                    argv,
                    shell=shell,
                    env={**env, "PYTHONPATH": _SUBMITIT},  # that of an unpacked launcher, too
                    cwd=self.folder,  # a file of the user may have the name of a module
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                # This process may live for days, and must reap its children.
                threading.Thread(target=process.wait, daemon=True).start()
                return process

            module.subprocess = SimpleNamespace(Popen=popen)
            try:
                job_id: str = self._submit_command(shlex.join(argv)).job_id
            finally:
                module.subprocess = subprocess
        return int(job_id)


def start(runs: Mapping[RunDir, WaitsFor], python: str, *, detach: bool) -> None:
    """Start the phases of runs one after another; unless detached, they end with this process.

    The first phase starts when the run that makes room for it has ended. If a phase fails, no later
    phase starts.
    """
    run, waits_for = next(iter(runs.items()))  # the guard of the first run also runs the others
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= {Variable.PYTHON: python, "PYTHONPATH": run.python_path}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # code/ stays what was submitted
    argv = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    argv += [sys.executable, "-m", "trnslurm.node.guard"]
    argv += [] if detach else ["--watch-pid", str(os.getpid())]
    if waits_for.end:
        argv += ["--behind", run.sibling(waits_for.end).record().jobs["local"]]
    argv += ["--output", str(RunFiles(Path()).batch_log("%s", "local")), "--"]
    argv += [str(each.script(phase)) for each in runs for phase in each.record().phases]
    run.local_folder.mkdir(exist_ok=True)
    pid = GuardedLocal(run.local_folder).start(argv)
    for each in runs:
        each.add_job("local", f"{pid}@{process_start(pid)}")


def stop(run: RunDir) -> None:
    """End a local run with TERM, so that its script records CANCELLED, and then with KILL."""
    record = run.record()
    if record.awaited and not any(run.attempts_since(record, p) for p in record.phases):
        return  # the process is still in the previous run; cancelled.json ends this run
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 10)):
        if not record.local_job_alive:
            return
        os.kill(int(record.local_job.partition("@")[0]), number)
        deadline = time.monotonic() + patience_s
        while record.local_job_alive and time.monotonic() < deadline:
            time.sleep(0.05)
