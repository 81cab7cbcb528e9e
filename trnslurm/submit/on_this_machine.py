"""Starts a run on this machine: submitit's LocalExecutor with one task, the guard of our scripts."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from submitit.local.local import LocalExecutor

from trnslurm.errors import SubmitError
from trnslurm.run import RunDir
from trnslurm.status import local_job, local_job_alive, process_start

# What the local run gets of this shell's environment; everything else stands in its script.
_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
_NO_LIMIT_MIN = 10 * 365 * 24 * 60  # submitit's own default is two minutes
_STOP_S = 45  # the guard gives the script and its nodes less than this


class GuardedLocal(LocalExecutor):
    """Runs one task whose command is ours."""

    def start(self, argv: Sequence[str]) -> int:
        """Start the task, and return the pid of its controller."""
        self.update_parameters(timeout_min=_NO_LIMIT_MIN)
        job_id: str = self._submit_command(shlex.join(argv)).job_id
        return int(job_id)


def find_python(configured: str) -> str:
    """Return the interpreter that runs the job: the profile's, or this one if it has torch."""
    if configured != "python3":
        return configured
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise SubmitError(
                f"{sys.executable} has no {module}, which the job needs: "
                "pip install 'trnslurm[train]' there, or set python: in a cluster profile"
            )
    return sys.executable


def start(run: RunDir, python: str, *, detach: bool) -> None:
    """Start the phases one after another; unless detached, they end with this process."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    kept |= {"TRNSLURM_PYTHON": python, "PYTHONPATH": str(run.code)}
    argv = ["env", "-i", *(f"{name}={value}" for name, value in kept.items())]
    argv += [sys.executable, "-m", "trnslurm.node.guard"]
    argv += [] if detach else ["--watch-pid", str(os.getpid())]
    argv += ["--output", str(run.logs / "%s-local.log"), "--"]
    argv += [str(run.script(phase)) for phase in run.record().phases]
    run.local_folder.mkdir()
    # Ctrl-C reaches every process of the terminal. Only this one shall act on it, and end the rest
    # in good order; an ignored signal is inherited.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pid = GuardedLocal(run.local_folder).start(argv)
    finally:
        signal.signal(signal.SIGINT, before)
    run.add_job("local", f"{pid}@{process_start(pid)}")


def stop(run: RunDir) -> None:
    """End a local run: TERM, so that its script writes CANCELLED down, then KILL."""
    record = run.record()
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 10)):
        if not local_job_alive(record):
            return
        os.kill(local_job(record)[0], number)
        deadline = time.monotonic() + patience_s
        while local_job_alive(record) and time.monotonic() < deadline:
            time.sleep(0.05)
