"""Puts a bundle into a run directory and starts it. The only user of submitit.

Of submitit two executors are used, through their private seams (tests freeze these): the text of
the submission file, the sbatch command, and `_submit_command`. No function is pickled, and none of
its results or states is read.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm import __version__
from trnslurm.compiled import CompileCache
from trnslurm.errors import RunError, SlurmError, SubmitError
from trnslurm.provenance import git_patch, git_state
from trnslurm.run import Record, RunDir, write_json
from trnslurm.run_root import check_run_root, create_run
from trnslurm.runs import remember_root
from trnslurm.slurm import Slurm
from trnslurm.submit.claiming import Claims
from trnslurm.submit.job import Job, Link, job_of, job_of_bundle, job_of_data, refuse_unprepared
from trnslurm.submit.precompile import Need, needs_of, still_compiles
from trnslurm.submit.resuming import begin_anew, job_ahead, what_to_resume
from trnslurm.trust import refuse_foreign

__all__ = [
    "Job",
    "Link",
    "Need",
    "cancel",
    "job_of",
    "job_of_bundle",
    "job_of_data",
    "needs_of",
    "refuse_unprepared",
    "resume",
    "still_compiles",
    "submit",
    "submit_chain",
]


def submit(job: Job, command: Sequence[str], *, detach: bool = False) -> RunDir:
    """Make the run directory and start the job; what was refused is said in one line."""
    (run,) = submit_chain([Link(job, lambda _: job)], command, detach=detach)
    return run


def submit_chain(
    links: Sequence[Link],
    command: Sequence[str],
    *,
    cache: CompileCache | None = None,
    detach: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[RunDir]:
    """Make a run of each link, and start all or none; each run waits for the one before it."""
    for link in links:
        refuse_unprepared(link.job)
    job = links[0].job  # all are of one cluster
    root = check_run_root(Path(job.profile.run_root))
    start = _starter(job, detach)  # what is missing on this host is found before anything is made
    with _privacy_of(job), Claims(cache or CompileCache(job.profile), say) as claims:
        runs = _make_runs(links, root, command, claims)
        start(runs)
        claims.complete()
    return runs


def resume(
    run: RunDir, *, detach: bool = False, say: Callable[[str], None] = lambda text: None
) -> list[RunDir]:
    """Submit a run again, and those that wait for it; what has begun to train is refused."""
    found = what_to_resume(run)
    job = found[0][1]
    ahead = job_ahead(run)
    start = _starter(job, detach, after=ahead)
    with _privacy_of(job), Claims(CompileCache(job.profile), say) as claims:
        for each, its_job in found:
            begin_anew(each, its_job)
            claims.settle(its_job, each)
        runs = [each for each, _ in found]
        start(runs)
        claims.complete()
    return runs


@contextlib.contextmanager
def _privacy_of(job: Job) -> Iterator[None]:
    """Let what is written be as private as the profile says, whatever this shell's umask."""
    umask = os.umask(0o027 if job.profile.group_readable else 0o077)
    try:
        yield
    finally:
        os.umask(umask)


def _make_runs(
    links: Sequence[Link], root: Path, command: Sequence[str], claims: Claims
) -> list[RunDir]:
    """Make the run directories, all of them or none."""
    runs: list[RunDir] = []
    try:
        for link in links:
            job = link.after(runs[-1]) if runs else link.job
            run = _make_run(job, root, command, after=runs[-1].name if runs else "")
            runs.append(run)
            claims.settle(job, run)
            if len(runs) > 1:
                ahead = runs[-2]
                ahead.write_record(replace(ahead.record(), then=run.name))
    except BaseException:
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return runs


def _make_run(job: Job, root: Path, command: Sequence[str], *, after: str) -> RunDir:
    """Make a run directory, whole or not at all."""
    run = create_run(root, job.name, group_readable=job.profile.group_readable)
    try:
        job.bundle.write(run.path)
        if job.source_dir and (patch := git_patch(Path(job.source_dir))):
            run.patch_file.write_bytes(patch)
        run.write_record(_record(job, run, command, after))
        remember_root(root)
    except BaseException as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{run.path}: cannot be written ({error.strerror})") from None
        raise
    return run


def _starter(job: Job, detach: bool, *, after: str = "") -> Callable[[Sequence[RunDir]], None]:
    # submitit takes 80 ms to import; only a submission needs it.
    if job.local:
        from trnslurm.submit import on_this_machine

        python = on_this_machine.find_python(job.profile.python)
        return lambda runs: on_this_machine.start(runs, python, detach=detach)
    from trnslurm.submit import on_slurm

    slurm = Slurm(job.profile.slurm.bin_dir)
    slurm.path("sbatch")
    return lambda runs: on_slurm.start(runs, slurm, after=after)


def cancel(run: RunDir) -> list[RunDir]:
    """Cancel every phase of a run, and the runs that wait for it; return all of them."""
    refuse_foreign(run.path, "cancel")
    record = run.record()
    if record.scheduler == "local" and record.host != socket.gethostname():
        raise SubmitError(f"{run.name} runs on {record.host}: cancel it there")
    runs = [run, *_waiting_for(record, run)]
    # Slurm forgets that of a job that never started; and no attempt starts beside this mark.
    for each in runs:
        try:
            write_json(each.cancelled_file, {"by": getpass.getuser(), "time": _now()})
        except OSError:
            pass  # a full disk is no reason to let the job run on
    try:
        if record.scheduler == "local":
            from trnslurm.submit import on_this_machine

            on_this_machine.stop(run)
        else:
            # The last phase first: else the end of the first could still release it.
            slurm = Slurm(record.bin_dir)
            jobs = [job for each in runs for job in _jobs_of(each, slurm)]
            if jobs:
                slurm.cancel(jobs[::-1])
    except SlurmError:
        for each in runs:
            each.cancelled_file.unlink(missing_ok=True)
        raise
    return runs


def _waiting_for(record: Record, run: RunDir) -> Iterator[RunDir]:
    """Give the run that waits for a run, the one that waits for that, and so on."""
    while record.then:
        run = run.beside(record.then)
        try:
            record = run.record()
            refuse_foreign(run.path, "cancel")
        except RunError:  # deleted by a person, or damaged: no reason to let this one run on
            return
        yield run


def _jobs_of(run: RunDir, slurm: Slurm) -> list[str]:
    record = run.record()
    return list(record.jobs.values()) or list(slurm.jobs_in(str(run.path), record.user).values())


def _record(job: Job, run: RunDir, command: Sequence[str], after: str) -> Record:
    return Record(
        run=run.name,
        name=job.name,
        recipe=job.recipe,
        preset=job.preset,
        cluster=job.cluster,
        scheduler=job.profile.scheduler,
        nodes=job.nodes,
        phases=job.phases,
        created=_now(),
        user=getpass.getuser(),
        host=socket.gethostname(),
        bin_dir=job.profile.slurm.bin_dir,
        command=tuple(command),
        versions={
            "trnslurm": __version__,
            "python": platform.python_version(),
            "submitit": importlib.metadata.version("submitit"),
        },
        git=git_state(Path(job.source_dir)) if job.source_dir else {},
        sha256=job.bundle.sha256(),
        after=after,
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
