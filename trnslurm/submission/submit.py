"""Starts a submission: each run gets its directory and its jobs. Either all runs start, or none."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trnslurm.cluster.cache import PRECOMPILE, Compiled
from trnslurm.console import Console
from trnslurm.contract.files import write_json
from trnslurm.contract.halving import place_in
from trnslurm.errors import NoAnswerError, RunError, SubmitError, TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.render.array import shared_options
from trnslurm.render.bundle import Bundle
from trnslurm.runs.find import remember_root
from trnslurm.runs.git import git_source
from trnslurm.runs.removal import remove_arrays
from trnslurm.runs.root import check_run_root, create_run
from trnslurm.schedulers.interface import BatchScript, WaitsFor
from trnslurm.schedulers.interrupts import interrupts_deferred
from trnslurm.submission.arrays import started_together, write_array
from trnslurm.submission.claims import Claims
from trnslurm.submission.halving import refuse_too_many, start_rungs, write_rungs
from trnslurm.submission.here import python_of
from trnslurm.submission.job import Job
from trnslurm.submission.lock import lock_run
from trnslurm.submission.precompile import Need
from trnslurm.submission.record import new_record, renew_record
from trnslurm.submission.submission import PlannedRun, Submission

_TELL_S = 10.0
_ONE_THREAD = threading.Lock()
"""umask and the working directory belong to the whole process."""


def submit(
    submission: Submission, command: Sequence[str], console: Console
) -> tuple[list[RunDir], list[RunDir]]:
    """Start the runs of a submission, all or none, and then each extra that can be started.

    The caller has checked the jobs on this host. `command` is the user's command line.
    """
    start = _Start(submission, command, console)
    runs = start.all_or_none()
    extras: list[RunDir] = []
    for extra in submission.extras:
        if extra.need and not extra.need.phases:
            continue
        single = Submission(runs=[extra], cache=submission.cache)
        try:
            extras += _Start(single, command, console).all_or_none()
        except TrnslurmError as error:
            console.warn(f"{extra.job.name}: {error}")
    return runs, extras


class _Start:
    """A single start of a submission."""

    def __init__(self, submission: Submission, command: Sequence[str], console: Console) -> None:
        self._submission, self._command, self._console = submission, command, console
        self._job = submission.job  # all runs are of one cluster
        self._root = check_run_root(Path(self._job.profile.run_root))
        self._git_source = functools.cache(git_source)
        self._together = [[chain] for chain in submission.chains]
        self._tell_at = time.monotonic() + _TELL_S
        self._written: tuple[Path, Bundle] | None = None
        """The run that was made last, with whose code the next one shares its own."""

    def all_or_none(self) -> list[RunDir]:
        start = self._starter()
        runs: list[RunDir] = []
        with privacy_of(self._job), Claims(self._submission.cache, self._console) as claims:
            try:
                for chains in self._together:
                    made: list[RunDir] = []
                    with contextlib.ExitStack() as locks:
                        for chain in chains:
                            with interrupts_deferred():
                                made += self._make(chain, claims, locks)
                                runs += made[-len(chain) :]
                            self._tell_of(len(runs))
                        with interrupts_deferred():
                            planned = itertools.chain(*chains)
                            awaited = [each.waits_for for each in planned]
                            start(dict(zip(made, awaited, strict=True)))
                    claims.complete()
                if self._submission.halving:
                    with interrupts_deferred():
                        with _whole(self._sweep_directory):
                            write_rungs(self._sweep_directory, runs, self._submission)
                        start_rungs(self._sweep_directory, runs, self._job.scheduler, self._console)
            except BaseException as error:
                if not self._submission.resumes:
                    with interrupts_deferred():
                        self._take_back(runs, error)
                raise
        return runs

    def _tell_of(self, made: int) -> None:
        """Report how many runs are created. On a shared file system, ten runs may take seconds."""
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + _TELL_S
            self._console.tell(f"Created {made} of {len(self._submission.runs)} runs")

    def _starter(self) -> Callable[[Mapping[RunDir, WaitsFor]], None]:
        """Return the function that starts runs together, or raise now if this host cannot."""
        submission, scheduler = self._submission, self._job.scheduler
        python, detach = python_of(self._job), self._console.detach
        if held := submission.held:
            return lambda runs: scheduler.start_inside(next(iter(runs)), held)
        most = scheduler.most_tasks() if submission.sweep else 0
        if submission.halving:
            refuse_too_many(submission.halving, most)
        self._try_out(most)
        self._together = started_together(submission, most)

        def start(runs: Mapping[RunDir, WaitsFor]) -> None:
            if not submission.sweep or len(runs) == 1:
                scheduler.start(runs, python=python, detach=detach)
                return
            with _whole(self._sweep_directory):
                place = write_array(self._sweep_directory, [*runs], submission)
            scheduler.start_array(place, [*runs], next(iter(runs.values())).jobs)

        return start

    def _try_out(self, most: int) -> None:
        """Let the scheduler test each kind of script before any is queued.

        Scripts with the same #SBATCH lines are tested once. The scripts of a sweep are tested as an
        array of all its jobs, up to the largest allowed array.
        """
        asked: dict[bytes, BatchScript] = {}
        jobs = 0
        for planned in self._submission.runs:
            job = planned.job
            origins = planned.resumes.record().origins if planned.resumes else job.origins
            for phase in planned.need.phases if planned.need else job.phases:
                jobs += 1
                script = job.script(phase)
                asked.setdefault(
                    shared_options(script),
                    BatchScript(script=script, origins=origins, instance_type=job.instance_type),
                )
        tasks = min(jobs, most) if self._submission.sweep else 1
        self._job.scheduler.try_out([*asked.values()], tasks, self._console)

    @property
    def _sweep_directory(self) -> Path:
        return self._root / self._submission.group

    def _make(
        self, chain: Sequence[PlannedRun], claims: Claims, locks: contextlib.ExitStack
    ) -> list[RunDir]:
        """Create the directories and records of a chain. Resumed runs already have them."""
        runs: list[RunDir] = []
        sources: list[Mapping[str, Any]] = []
        created: list[RunDir] = []
        try:
            for planned in chain:
                if planned.resumes:
                    runs.append(planned.resumes)
                    sources.append({})
                    continue
                run = self._create(planned)
                runs.append(run)
                created.append(run)
                with _whole(run.path):
                    sources.append(self._write(run, planned.job))
                locks.enter_context(lock_run(run))
            needs = [self._need(*each, claims) for each in zip(chain, runs, strict=True)]
            every = [*zip(chain, runs, needs, sources, strict=True)]
            # Last run first: a record never names a run without a record.
            then = ""
            for planned, run, need, git in reversed(every):
                with _whole(run.path):
                    if planned.resumes:
                        renew_record(run, planned, need)
                    else:
                        record = new_record(run, planned, need, git, self._command)
                        group, stages = self._submission.group, self._submission.stages
                        record = replace(record, group=group, stages=stages)
                        warned = tuple(self._console.warnings)
                        then = "" if stages else then
                        run.write_record(replace(record, then=then, warned=warned))
                        if halving := self._submission.halving:
                            write_json(run.rung_file, place_in(halving.rungs, 1))
                then = run.name
            remember_root(self._root)
        except BaseException:
            for run in created:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        return runs

    def _take_back(self, runs: Sequence[RunDir], error: BaseException) -> None:
        """Cancel the started runs of a rejected submission, and record why, or remove them."""
        why = error if isinstance(error, TrnslurmError) else SubmitError("interrupted")
        started = [run for run in runs if not run.record().refused]
        if started:
            self._job.scheduler.take_back(started, why)
        # A controller that did not answer may have queued a job.
        queued = isinstance(error, NoAnswerError) or any(run.record().jobs for run in runs)
        if not queued and isinstance(error, TrnslurmError | KeyboardInterrupt):
            for run in runs:
                shutil.rmtree(run.path, ignore_errors=True)
            if self._submission.sweep:
                remove_arrays(self._sweep_directory)

    def _create(self, planned: PlannedRun) -> RunDir:
        stamp, job = self._submission.stamp, planned.job
        group_readable = job.profile.group_readable
        run = create_run(self._root, job.name, group_readable=group_readable, stamp=stamp)
        if stamp and run.name != self._submission.name_of(planned):
            shutil.rmtree(run.path, ignore_errors=True)
            raise RunError(f"{run.path}: another run already has this name: submit it again")
        return run

    def _write(self, run: RunDir, job: Job) -> Mapping[str, Any]:
        """Write the bundle and the uncommitted changes; return the git state."""
        job.bundle.write(run.path, self._written)
        self._written = run.path, job.bundle
        commit, patch = job.git, job.patch
        if job.source_dir:
            commit, patch = self._git_source(Path(job.source_dir))
        if patch:
            run.patch_file.write_bytes(patch)
        return commit

    def _need(self, planned: PlannedRun, run: RunDir, claims: Claims) -> Need:
        """Decide whether the run starts with a precompile job."""
        if not planned.waits_for.graphs:
            # Other runs cannot wait for a step, and a step cannot wait for them.
            held = self._submission.held is not None
            need = claims.decide(
                planned.job,
                run,
                waits=held or bool(planned.waits_for.success or planned.waits_for.jobs),
            )
            compiled_elsewhere = held and need.decision == "compiling"
            return replace(need, decision="cold", other=None) if compiled_elsewhere else need
        known, job = Compiled(), ""
        compiling = run.sibling(planned.waits_for.graphs)
        versions: Mapping[str, str] = {}
        if compiling.record_file.exists():  # a run of the same chain has no record yet
            record = compiling.record()
            known = Compiled(key=str(record.precompile.get("key", "")))
            versions = record.precompile.get("versions", {})
            job = record.jobs.get(PRECOMPILE, "")  # on this machine the runs follow one another
        elif planned.need:
            known, versions = planned.need.compiled, planned.need.versions
        return Need(
            job=planned.job, decision="before", compiled=known, versions=versions, job_before=job
        )


@contextlib.contextmanager
def privacy_of(job: Job) -> Iterator[None]:
    """Set the umask that the profile requires, and restore the shell's umask afterward."""
    with _ONE_THREAD:
        umask = os.umask(job.profile.umask)
        try:
            yield
        finally:
            os.umask(umask)


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {directory} ({error.strerror})") from None
