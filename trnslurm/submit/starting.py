"""What every submission does alike: find what is missing beforehand, keep its files private."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

from trnslurm.runs.run import RunDir
from trnslurm.slurm.commands import Slurm
from trnslurm.submit.job import Job


def starter(job: Job, *, detach: bool, after: str = "") -> Callable[[Sequence[RunDir]], None]:
    """Return what starts runs like this job; what this host lacks for it is an error now."""
    # submitit takes 80 ms to import; only a submission needs it.
    if job.local:
        from trnslurm.submit import on_this_machine

        python = on_this_machine.find_python(job.profile.python)
        return lambda runs: on_this_machine.start(runs, python, detach=detach)
    from trnslurm.submit import on_slurm

    slurm = Slurm(job.profile.slurm.bin_dir)
    slurm.path("sbatch")
    return lambda runs: on_slurm.start(runs, slurm, after=after)


@contextlib.contextmanager
def privacy_of(job: Job) -> Iterator[None]:
    """Let what is written be as private as the profile says, whatever this shell's umask."""
    umask = os.umask(0o027 if job.profile.group_readable else 0o077)
    try:
        yield
    finally:
        os.umask(umask)


def utc_now() -> str:
    """Return the time as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
