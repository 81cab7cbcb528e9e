"""Submits jobs: each gets a run directory, and all of a chain are started or none."""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trnslurm import __version__
from trnslurm.cluster.cache import CompileCache
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.runs.find import remember_root
from trnslurm.runs.git import git_patch, git_state
from trnslurm.runs.root import check_run_root, create_run
from trnslurm.runs.run import Record, RunDir, utc_now
from trnslurm.slurm.commands import Slurm
from trnslurm.submit.claims import Claims
from trnslurm.submit.here import find_python
from trnslurm.submit.job import Job, Link, alone
from trnslurm.submit.lock import lock_run
from trnslurm.submit.precompile import Need

_ALONE = threading.Lock()
"""One thread at a time: umask and working directory are those of the whole process."""


def submit_chain(
    links: Sequence[Link],
    command: Sequence[str],
    *,
    cache: CompileCache,
    detach: bool = False,
    say: Callable[[str], None],
) -> list[RunDir]:
    """Make a run of each link, and start all or none; each run waits for the one before it.

    The caller has checked what this host can see: check_here.
    """
    job = links[0].job  # all are for one cluster
    root = check_run_root(Path(job.profile.run_root))
    start = starter(job, detach=detach)
    with privacy_of(job), Claims(cache, say) as claims:
        with contextlib.ExitStack() as locks:
            runs = _make_runs(links, root, command, claims, locks)
            start(runs)
        claims.complete()
    return runs


def submit_ahead(
    jobs: Sequence[Job], command: Sequence[str], *, cache: CompileCache, say: Callable[[str], None]
) -> list[RunDir]:
    """Start jobs that nothing waits for; if one is refused, say so and start the others."""
    runs: list[RunDir] = []
    for job in jobs:
        try:
            runs += submit_chain([alone(job)], command, cache=cache, detach=True, say=say)
        except TrnslurmError as error:
            say(f"warning: {job.name}: {error}")
    return runs


def starter(job: Job, *, detach: bool, after: str = "") -> Callable[[Sequence[RunDir]], None]:
    """Return what starts runs like this job; what this host lacks for it is an error now."""
    # submitit takes 80 ms to import; only a submission needs it.
    if job.local:
        from trnslurm.submit import on_this_machine

        python = find_python(job)
        return lambda runs: on_this_machine.start(runs, python, detach=detach)
    from trnslurm.submit import on_slurm

    slurm = Slurm(job.profile.slurm.bin_dir)
    slurm.path("sbatch")
    return lambda runs: on_slurm.start(runs, slurm, after=after)


@contextlib.contextmanager
def privacy_of(job: Job) -> Iterator[None]:
    """Keep what is written as private as the profile says, whatever this shell's umask."""
    with _ALONE:
        umask = os.umask(0o027 if job.profile.group_readable else 0o077)
        try:
            yield
        finally:
            os.umask(umask)


def _make_runs(
    links: Sequence[Link], root: Path, command: Sequence[str], claims: Claims,
    locks: contextlib.ExitStack,
) -> list[RunDir]:  # fmt: skip
    """Make the run directories, all of them or none; nobody may resume them meanwhile."""
    jobs: list[Job] = []
    runs: list[RunDir] = []
    try:
        for link in links:
            job = link.after(runs[-1]) if runs else link.job
            run = create_run(root, job.name, group_readable=job.profile.group_readable)
            jobs.append(job)
            runs.append(run)
            with _whole(run):
                job.bundle.write(run.path)
                if job.source_dir and (patch := git_patch(Path(job.source_dir))):
                    run.patch_file.write_bytes(patch)
            locks.enter_context(lock_run(run))
        needs = [claims.decide(j, r, waits=r != runs[0]) for j, r in zip(jobs, runs, strict=True)]
        names = ["", *(run.name for run in runs), ""]
        # The last first: a record never names a run that has none.
        for need, run, after, then in [*zip(needs, runs, names, names[2:], strict=False)][::-1]:
            with _whole(run):
                run.write_record(_record(need, run, command, after=after, then=then))
        remember_root(root)
    except BaseException:
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return runs


@contextlib.contextmanager
def _whole(run: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{run.path}: cannot be written ({error.strerror})") from None


def _record(need: Need, run: RunDir, command: Sequence[str], *, after: str, then: str) -> Record:
    job = need.job
    return Record(
        run=run.name,
        name=job.name,
        recipe=job.recipe,
        preset=job.preset,
        cluster=job.cluster,
        scheduler=job.profile.scheduler,
        nodes=job.nodes,
        # A job that only precompiles finds out by itself that there is nothing to do.
        phases=need.phases or job.phases,
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
        then=then,
        precompile=need.record(),
    )
