"""Puts a bundle into a run directory and starts it. The only user of submitit.

Of submitit two executors are used, through their private seams (tests freeze these): the text of
the submission file, the sbatch command, and `_submit_command`. No function is pickled, and none of
its results or states is read.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trnslurm import __version__
from trnslurm.errors import RunError, SlurmError, SubmitError
from trnslurm.provenance import git_patch, git_state
from trnslurm.run import Record, RunDir, check_run_root, create_run, write_json
from trnslurm.runs import remember_root
from trnslurm.slurm import Slurm
from trnslurm.submit.job import Job, job_of, job_of_bundle, job_of_data, refuse_unprepared

__all__ = ["Job", "cancel", "job_of", "job_of_bundle", "job_of_data", "submit"]


def submit(job: Job, command: Sequence[str], *, detach: bool = False) -> RunDir:
    """Make the run directory and start the job; what was refused is said in one line."""
    refuse_unprepared(job)
    root = check_run_root(Path(job.run_root))
    start = _starter(job, detach)  # what is missing on this host is found before anything is made
    # The run is as private as its profile says, whatever this shell's umask.
    umask = os.umask(0o027 if job.group_readable else 0o077)
    try:
        run = _make_run(job, root, command)
        start(run)
    finally:
        os.umask(umask)
    return run


def _make_run(job: Job, root: Path, command: Sequence[str]) -> RunDir:
    """Make the run directory, whole or not at all."""
    run = create_run(root, job.name, group_readable=job.group_readable)
    try:
        job.bundle.write(run.path)
        if job.source_dir and (patch := git_patch(Path(job.source_dir))):
            run.patch_file.write_bytes(patch)
        run.write_record(_record(job, run, command))
        remember_root(root)
    except BaseException as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{run.path}: cannot be written ({error.strerror})") from None
        raise
    return run


def _starter(job: Job, detach: bool) -> Callable[[RunDir], None]:
    # submitit takes 80 ms to import; only a submission needs it.
    if job.scheduler == "local":
        from trnslurm.submit import on_this_machine

        python = on_this_machine.find_python(job.python)
        return lambda run: on_this_machine.start(run, python, detach=detach)
    from trnslurm.submit import on_slurm

    slurm = Slurm(job.bin_dir)
    slurm.path("sbatch")
    return lambda run: on_slurm.start(run, slurm)


def cancel(run: RunDir) -> None:
    """Cancel the whole chain of a run."""
    record = run.record()
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise SubmitError(f"{run.name} runs on {record.host}: cancel it there")
    # Slurm forgets that of a job that never started; and no attempt starts beside this mark.
    try:
        write_json(run.cancelled_file, {"by": getpass.getuser(), "time": _now()})
    except OSError:
        pass  # a full disk is no reason to let the job run on
    try:
        if record.scheduler == "local":
            from trnslurm.submit import on_this_machine

            on_this_machine.stop(run)
        else:
            # The last phase first: else the end of the first could still release it.
            slurm = Slurm(record.bin_dir)
            jobs = list(record.jobs.values()) or list(
                slurm.jobs_in(str(run.path), record.user).values()
            )
            if jobs:
                slurm.cancel(jobs[::-1])
    except SlurmError:
        run.cancelled_file.unlink(missing_ok=True)
        raise


def _record(job: Job, run: RunDir, command: Sequence[str]) -> Record:
    return Record(
        run=run.name,
        name=job.name,
        recipe=job.recipe,
        preset=job.preset,
        cluster=job.cluster,
        scheduler=job.scheduler,
        nodes=job.nodes,
        phases=job.phases,
        created=_now(),
        user=getpass.getuser(),
        host=socket.gethostname(),
        bin_dir=job.bin_dir,
        command=tuple(command),
        versions={
            "trnslurm": __version__,
            "python": platform.python_version(),
            "submitit": importlib.metadata.version("submitit"),
        },
        git=git_state(Path(job.source_dir)) if job.source_dir else {},
        sha256=job.bundle.sha256(),
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
