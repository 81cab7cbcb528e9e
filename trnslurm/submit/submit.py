"""Submits jobs: each gets a run directory, and all of a chain are started or none."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm import __version__
from trnslurm.cluster.cache import PRECOMPILE, CompileCache, Compiled
from trnslurm.errors import RunError, SubmitError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.runs.find import remember_root
from trnslurm.runs.git import git_source
from trnslurm.runs.root import check_run_root, create_run, time_stamp
from trnslurm.runs.run import Record, RunDir, utc_now
from trnslurm.slurm.commands import Slurm
from trnslurm.submit.cancel import cancel
from trnslurm.submit.claims import Claims
from trnslurm.submit.here import find_python
from trnslurm.submit.job import Job, Link, alone
from trnslurm.submit.lock import lock_run
from trnslurm.submit.precompile import Need, graphs_of

_POLL_S = 0.1
Source = tuple[Mapping[str, Any], bytes]
"""The commit of a job's code, and uncommitted changes."""
_ALONE = threading.Lock()
"""One thread at a time: umask and working directory are those of the whole process."""


def submit_chain(
    links: Sequence[Link],
    command: Sequence[str],
    *,
    cache: CompileCache,
    stamp: str = "",
    detach: bool = False,
    say: Callable[[str], None],
) -> list[RunDir]:
    """Make a run of each link, and start all or none; each run waits for the one before it.

    The caller has checked what this host can see: check_here. Their names begin with the time
    `stamp`; empty: now.
    """
    job = links[0].job  # all are for one cluster
    root = check_run_root(Path(job.profile.run_root))
    start = starter(job, detach=detach)
    with privacy_of(job), Claims(cache, say) as claims:
        with contextlib.ExitStack() as locks:
            runs = _make_runs(
                links, root, command, claims, locks, functools.cache(git_source), stamp=stamp
            )
            start(runs)
        claims.complete()
    return runs


def submit_sweep(
    jobs: Sequence[Job],
    points: Sequence[Mapping[str, str]],
    command: Sequence[str],
    *,
    name: str,
    at_most: int | None,
    cache: CompileCache,
    detach: bool = False,
    say: Callable[[str], None],
) -> list[RunDir]:
    """Make a run of each job, a point of the sweep, and start all or none.

    Each waits for the end of the run that is `at_most` before it; what compiles the same graphs
    waits for the run that compiles them.
    """
    root = check_run_root(Path(jobs[0].profile.run_root))
    stamp = _free_stamp(root, name)
    runs: list[RunDir] = []
    compiling: dict[str, RunDir] = {}
    source_of = functools.cache(git_source)  # all are of one recipe
    with privacy_of(jobs[0]), Claims(cache, say) as claims:
        try:
            for number, (job, values) in enumerate(zip(jobs, points, strict=True)):
                behind = runs[number - at_most] if at_most and number >= at_most else None
                part = Part(
                    group=f"{stamp}-{name}", stamp=stamp, values=values, behind=behind,
                    compiles=compiling.get(graphs_of(job)),
                )  # fmt: skip
                start = starter(job, detach=detach, behind=behind)
                with contextlib.ExitStack() as locks:
                    runs += _make_runs([alone(job)], root, command, claims, locks, source_of, part)
                    start(runs[-1:])
                claims.complete()
                if PRECOMPILE in runs[-1].record().phases:
                    compiling[graphs_of(job)] = runs[-1]
        except BaseException as error:
            _take_back(runs, jobs[0], error)
            raise
    return runs


def _free_stamp(root: Path, name: str) -> str:
    """Return the time for a sweep's name: the next second, if another one has this."""
    while (root / f"{(stamp := time_stamp())}-{name}-1").exists():
        time.sleep(_POLL_S)
    return stamp


def _take_back(runs: Sequence[RunDir], job: Job, error: BaseException) -> None:
    """End the runs of a sweep of which one was refused, and note why."""
    why = error if isinstance(error, TrnslurmError) else SubmitError("interrupted")
    started = [run for run in runs if not run.record().refused]
    if job.local:
        for run in started:
            run.write_record(replace(run.record(), refused=str(why)))
            cancel(run)
    elif started:
        from trnslurm.submit import on_slurm

        on_slurm.take_back(started, Slurm(job.profile.slurm.bin_dir), why)


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


def starter(
    job: Job, *, detach: bool, after: str = "", behind: RunDir | None = None
) -> Callable[[Sequence[RunDir]], None]:
    """Return what starts runs like this job; what this host lacks for it is an error now.

    They wait for the job `after` to succeed, and for the run `behind` to end.
    """
    ahead = behind.record() if behind else None
    # submitit takes 80 ms to import; only a submission needs it.
    if job.local:
        from trnslurm.submit import on_this_machine

        python = find_python(job)
        local = ahead.jobs["local"] if ahead else ""
        return lambda runs: on_this_machine.start(runs, python, detach=detach, behind=local)
    from trnslurm.submit import on_slurm

    slurm = Slurm(job.profile.slurm.bin_dir)
    slurm.path("sbatch")
    last = ahead.jobs[ahead.phases[-1]] if ahead else ""
    return lambda runs: on_slurm.start(runs, slurm, after=after, behind=last)


class Part(Frozen):
    """A run's part in a sweep."""

    group: str
    stamp: str
    values: Mapping[str, str]
    behind: RunDir | None
    """The run whose end makes room for it."""
    compiles: RunDir | None
    """The run that compiles its graphs."""

    def need(self, job: Job) -> Need | None:
        """Return what it needs, if another run compiles its graphs."""
        if self.compiles is None:
            return None
        record = self.compiles.record()
        known = record.precompile
        return Need(
            job=job, decision="before", compiled=Compiled(key=str(known.get("key", ""))),
            versions=known.get("versions", {}),
            job_before=record.jobs.get(PRECOMPILE, ""),  # none on this machine: it is behind it
        )  # fmt: skip


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
    locks: contextlib.ExitStack, source_of: Callable[[Path], Source], part: Part | None = None, *,
    stamp: str = "",
) -> list[RunDir]:  # fmt: skip
    """Make the run directories, all of them or none; nobody may resume them meanwhile."""
    jobs: list[Job] = []
    runs: list[RunDir] = []
    commits: list[Mapping[str, Any]] = []
    stamp = part.stamp if part else stamp
    try:
        for link in links:
            job = link.after(runs[-1]) if runs else link.job
            run = create_run(
                root, job.name, group_readable=job.profile.group_readable,
                stamp=stamp,
            )  # fmt: skip
            jobs.append(job)
            runs.append(run)
            if stamp and run.name != f"{stamp}-{job.name}":
                raise RunError(f"{run.path}: another run has its name: submit it again")
            with _whole(run):
                job.bundle.write(run.path)
                here = Path(job.source_dir) if job.source_dir else None
                commit, patch = source_of(here) if here else (job.git, job.patch)
                commits.append(commit)
                if patch:
                    run.patch_file.write_bytes(patch)
            locks.enter_context(lock_run(run))
        needs = [
            (part and part.need(job)) or claims.decide(job, run, waits=run != runs[0])
            for job, run in zip(jobs, runs, strict=True)
        ]
        names = ["", *(run.name for run in runs), ""]
        # The last first: a record never names a run that has none.
        every = [*zip(needs, runs, commits, names, names[2:], strict=False)]
        for need, run, git, after, then in reversed(every):
            with _whole(run):
                run.write_record(_record(need, run, git, command, part, after=after, then=then))
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


def _record(
    need: Need,
    run: RunDir,
    git: Mapping[str, Any],
    command: Sequence[str],
    part: Part | None,
    *,
    after: str,
    then: str,
) -> Record:
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
        git=git,
        sha256=job.bundle.sha256(),
        after=after,
        then=then,
        group=part.group if part else "",
        values=part.values if part else {},
        behind=part.behind.name if part and part.behind else "",
        precompile=need.record(),
        origins=job.origins,
    )
