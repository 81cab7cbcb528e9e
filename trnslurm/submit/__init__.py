"""Puts a bundle into a run directory and starts it. The only user of submitit.

Of submitit two executors are used, through their private seams (tests freeze these): the text of
the submission file, the sbatch command, and `_submit_command`. No function is pickled, and none of
its results or states is read.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import platform
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trnslurm import __version__
from trnslurm.cluster.cache import CompileCache
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.runs.find import remember_root
from trnslurm.runs.git import git_patch, git_state
from trnslurm.runs.root import check_run_root, create_run
from trnslurm.runs.run import Record, RunDir
from trnslurm.submit.cancelling import Cancelled, cancel
from trnslurm.submit.claiming import Claims
from trnslurm.submit.elastic import jobs_ahead
from trnslurm.submit.job import (
    Job,
    Link,
    alone,
    job_of,
    job_of_bundle,
    job_of_data,
    refuse_unprepared,
)
from trnslurm.submit.precompile import Need, need_of, needs_of
from trnslurm.submit.resuming import Resumed, resume
from trnslurm.submit.starting import privacy_of, starter, utc_now
from trnslurm.submit.turns import turn

__all__ = [
    "Cancelled",
    "Job",
    "Link",
    "Need",
    "Resumed",
    "alone",
    "cancel",
    "job_of",
    "job_of_bundle",
    "job_of_data",
    "jobs_ahead",
    "need_of",
    "needs_of",
    "refuse_unprepared",
    "resume",
    "submit",
    "submit_ahead",
    "submit_chain",
]


def submit(job: Job, command: Sequence[str], *, detach: bool = False) -> RunDir:
    """Make the run directory and start the job; what was refused is said in one line."""
    (run,) = submit_chain([alone(job)], command, detach=detach)
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
    start = starter(
        job, detach=detach
    )  # what is missing on this host is found before anything is made
    with privacy_of(job), Claims(cache or CompileCache(job.profile), say) as claims:
        with contextlib.ExitStack() as turns:
            runs = _make_runs(links, root, command, claims, turns)
            start(runs)
        claims.complete()
    return runs


def submit_ahead(
    jobs: Sequence[Job], command: Sequence[str], *, cache: CompileCache, say: Callable[[str], None]
) -> list[RunDir]:
    """Start jobs that nothing waits for; one that is refused is said, and the others start."""
    runs: list[RunDir] = []
    for job in jobs:
        try:
            runs += submit_chain([alone(job)], command, cache=cache, detach=True, say=say)
        except TrnslurmError as error:
            say(f"warning: {job.name}: {error}")
    return runs


def _make_runs(
    links: Sequence[Link], root: Path, command: Sequence[str], claims: Claims,
    turns: contextlib.ExitStack,
) -> list[RunDir]:  # fmt: skip
    """Make the run directories, all of them or none; nobody may resume them meanwhile."""
    runs: list[RunDir] = []
    try:
        for link in links:
            job = link.after(runs[-1]) if runs else link.job
            run = _make_run(job, root, command, after=runs[-1].name if runs else "")
            runs.append(run)
            turns.enter_context(turn(run))
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
        created=utc_now(),
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
