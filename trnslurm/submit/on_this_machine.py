"""Starts a run on this machine: submitit's LocalExecutor, whose one task guards our scripts."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from submitit.local.local import LocalExecutor

from trnslurm.rundir import RunFiles
from trnslurm.runs.process import local_job, local_job_alive, process_start
from trnslurm.runs.run import RunDir

# What the local run gets from this shell's environment; everything else is in its script.
_ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",  # which GPUs of this machine are the user's own
)  # fmt: skip
_NO_LIMIT_MIN = 10 * 365 * 24 * 60  # submitit's own default is two minutes
_STOP_S = 45  # the guard gives the script and its nodes less than this


class GuardedLocal(LocalExecutor):
    """Runs one task whose command is ours."""

    def start(self, argv: Sequence[str]) -> int:
        """Start the task, and return the pid of its controller."""
        self.update_parameters(timeout_min=_NO_LIMIT_MIN)
        job_id: str = self._submit_command(shlex.join(argv)).job_id
        return int(job_id)


def start(runs: Sequence[RunDir], python: str, *, detach: bool) -> None:
    """Start the phases of the runs one after another; unless detached, they end with us."""
    run = runs[0]  # its guard runs the others as well
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    kept |= {"TRNSLURM_PYTHON": python, "PYTHONPATH": str(run.code)}
    kept["PYTHONDONTWRITEBYTECODE"] = "1"  # code/ stays what was submitted
    argv = ["env", "-i", *(f"{name}={value}" for name, value in kept.items())]
    argv += [sys.executable, "-m", "trnslurm.node.guard"]
    argv += [] if detach else ["--watch-pid", str(os.getpid())]
    argv += ["--output", str(RunFiles(Path()).batch_log("%s", "local")), "--"]
    argv += [str(each.script(phase)) for each in runs for phase in each.record().phases]
    run.local_folder.mkdir(exist_ok=True)
    with _apart_from_terminal(run.local_folder / "controller.log"):
        pid = GuardedLocal(run.local_folder).start(argv)
    for each in runs:
        each.add_job("local", f"{pid}@{process_start(pid)}")


@contextlib.contextmanager
def _apart_from_terminal(log: Path) -> Iterator[None]:
    """Let processes start that Ctrl-C does not reach and that hold no pipe of ours open.

    submitit has no option for that, but a process inherits ignored signals and descriptors. Only
    this process is to act on Ctrl-C, and to end the others in good order.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = [os.dup(fd) for fd in range(3)]
    try:
        with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
            for fd, file in enumerate((nothing, output, output)):
                os.dup2(file.fileno(), fd)
            yield
    finally:
        for fd, old in enumerate(kept):
            os.dup2(old, fd)
            os.close(old)
        signal.signal(signal.SIGINT, interrupt)


def stop(run: RunDir) -> None:
    """End a local run: by TERM, so that its script notes CANCELLED, then by KILL."""
    record = run.record()
    if record.after and not any(run.attempts_since(record, p) for p in record.phases):
        return  # it is the run before it that would be ended: this one sees its mark and ends
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 10)):
        if not local_job_alive(record):
            return
        os.kill(local_job(record)[0], number)
        deadline = time.monotonic() + patience_s
        while local_job_alive(record) and time.monotonic() < deadline:
            time.sleep(0.05)
