"""Starts runs on Slurm with submitit's SlurmExecutor, which submits the rendered scripts."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from trnslurm.contract.files import read_file, read_json, write_json
from trnslurm.errors import NoAnswerError, SlurmError, SubmitError, TrnslurmError
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import WaitsFor
from trnslurm.schedulers.interrupts import interrupts_deferred
from trnslurm.schedulers.slurm.asked import Asked
from trnslurm.slurm.commands import Slurm, overriding, own_words

_TIMEOUT_S = 60
# A busy controller may answer again before it has read all earlier requests.
_LOOKS_S = (0, 10, 20)


class RenderedSlurm(SlurmExecutor):
    """Submits a rendered script, with our options on sbatch's command line."""

    def __init__(self, folder: str, script: Path, argv: Sequence[str]) -> None:
        super().__init__(folder)
        self._script, self._argv = script, list(argv)

    @classmethod
    def affinity(cls) -> int:
        return 2  # sbatch has been found; srun need not be on this shell's PATH

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return ""  # the file that submitit makes is scratch: the script itself is submitted

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self._argv, str(self._script)]

    def send(self) -> str:
        """Submit the script and return Slurm's job id."""
        job_id: str = self._submit_command("").job_id
        return job_id


def start(runs: Mapping[RunDir, WaitsFor], slurm: Slurm) -> None:
    """Submit all phases of runs; each phase waits until the previous phase has succeeded.

    The first phase of a run waits for the other runs, which have already been submitted.
    """
    with _all_or_none([*runs], slurm) as interrupts:
        for run, waits_for in runs.items():
            record = run.record()
            dependencies = _before(run, record, waits_for)
            for phase in record.phases:
                job = _submit(run, run.path, phase, slurm, dependencies)
                run.add_job(phase, job)
                dependencies = _after([job])
                if interrupts:
                    raise SubmitError("interrupted")


def _before(run: RunDir, record: Record, waits_for: WaitsFor) -> list[str]:
    """Return the dependencies of a run's first phase."""
    awaited = [last_job(run, other) for other in waits_for.success]
    found = _after([*awaited, str(record.precompile.get("waits_for", ""))])
    if room := last_job(run, waits_for.end):
        found.append(f"afterany:{room}")
    return [*found, waits_for.jobs] if waits_for.jobs else found


def start_array(place: Path, runs: Sequence[RunDir], slurm: Slurm, jobs: str) -> None:
    """Submit the last phases of runs as the array in `place`, after the jobs that compile for them.

    `jobs` is the dependency on other jobs.
    """
    also = [jobs] if jobs else []
    records = [run.record() for run in runs]
    phase = records[0].phases[-1]
    compiling: list[str] = []
    with _all_or_none(runs, slurm) as interrupts:
        for run, record in zip(runs, records, strict=True):
            previous = str(record.precompile.get("waits_for", ""))
            for early in record.phases[:-1]:
                previous = _submit(run, run.path, early, slurm, _after([previous]) + also)
                run.add_job(early, previous)
                if interrupts:
                    raise SubmitError("interrupted")
            compiling.append(previous)
        awaited = [*filter(None, dict.fromkeys(compiling))]
        array = _submit(runs[0], place, phase, slurm, _after(awaited) + also)
        for task, (run, record) in enumerate(zip(runs, records, strict=True), 1):
            if len(record.phases) > 1:
                run.add_job(phase, f"{array}_{task}")
                continue
            facts = {"waits_for": awaited[0], **record.precompile} if awaited else record.precompile
            jobs_of = {**record.jobs, phase: f"{array}_{task}"}
            run.write_record(replace(record, jobs=jobs_of, precompile=facts))
        if interrupts:
            raise SubmitError("interrupted")


def start_rung(place: Path, run: RunDir, slurm: Slurm, after: Sequence[str], tasks: str) -> str:
    """Submit the array of a rung to start after jobs have ended in any state; return its id."""
    dependencies = [f"afterany:{':'.join(after)}"] if after else []
    phase = run.record().phases[-1]
    return _submit(run, place, phase, slurm, dependencies, tasks)


@contextlib.contextmanager
def _all_or_none(runs: Sequence[RunDir], slurm: Slurm) -> Iterator[list[int]]:
    """Defer Ctrl-C while runs are being submitted; cancel them all if one is rejected."""
    with interrupts_deferred() as interrupts:
        try:
            yield interrupts
        except TrnslurmError as error:
            take_back(runs, slurm, error)
            kind = NoAnswerError if isinstance(error, NoAnswerError) else SubmitError
            raise kind(str(error)) from None  # after Ctrl-C, KeyboardInterrupt takes its place


def _after(jobs: Sequence[str]) -> list[str]:
    """Return the dependency on the success of jobs, or nothing if there are no jobs."""
    awaited = ":".join(filter(None, jobs))
    return [f"afterok:{awaited}"] if awaited else []


def last_job(run: RunDir, other: str) -> str:
    """Return the last job of another run in the same run root; empty if no run is named."""
    if not other:
        return ""
    record = run.sibling(other).record()
    return record.jobs[record.phases[-1]]


def _submit(
    run: RunDir,
    place: Path,
    phase: str,
    slurm: Slurm,
    dependencies: Sequence[str],
    tasks: str = "",
) -> str:
    """Submit a phase's script from the run's or an array's directory; return the job's id.

    `tasks` lists the tasks of the array to submit; empty means all in the script.
    """
    # A comma: all of them. https://slurm.schedmd.com/sbatch.html#OPT_dependency
    options = [f"--dependency={','.join(dependencies)}", "--kill-on-invalid-dep=yes"]
    options = [*(options if dependencies else []), *([f"--array={tasks}"] if tasks else [])]
    argv = ["env", *(f"--unset={name}" for name in overriding(os.environ))]
    argv += ["timeout", str(_TIMEOUT_S), slurm.path("sbatch"), *options]
    with (
        tempfile.TemporaryDirectory() as scratch,  # submitit's own records are not needed
        contextlib.chdir(place),  # becomes SLURM_SUBMIT_DIR, where the script finds its bundle
        contextlib.redirect_stderr(io.StringIO()),  # submitit prints the error that it raises
    ):
        try:
            return RenderedSlurm(scratch, place / run.script(phase).name, argv).send()
        except (FailedJobError, FailedSubmissionError) as error:
            raise _failure(error, slurm, run, phase) from None


def _failure(error: Exception, slurm: Slurm, run: RunDir, phase: str) -> SubmitError:
    cause = error.__cause__
    words = own_words("sbatch", str(error)) or "sbatch: failed and printed nothing"
    if isinstance(cause, subprocess.CalledProcessError) and cause.returncode == 124:
        said = f" ({words.removeprefix('sbatch: ')})" if "retrying" in words else ""
        return NoAnswerError(f"sbatch: no answer within {_TIMEOUT_S} s{said}")
    asked = Asked(
        script=read_file(run.script(phase)),
        origins=run.record().origins,
        instance_type=str(read_json(run.plan_file).get("instance_type")),
    )
    words = asked.explain(words, slurm)
    # Without the exit code of a refusal, the job may be queued.
    refused = isinstance(cause, subprocess.CalledProcessError) and "timed out" not in words.lower()
    return SubmitError(words) if refused else NoAnswerError(words)


def take_back(runs: Sequence[RunDir], slurm: Slurm, error: TrnslurmError) -> None:
    """Cancel the jobs of a submission that was partly rejected.

    A controller that did not answer may have queued the job, or may still queue it. Queued jobs are
    cancelled, and a job that starts later sees cancelled.json and ends at once.
    """
    for run in runs:
        run.write_record(replace(run.record(), refused=str(error)))
        write_json(run.cancelled_file, {"by": "trnslurm submit", "why": str(error)})
    silent = _cancel_all(runs, slurm, looking=isinstance(error, NoAnswerError))
    if silent:
        raise NoAnswerError(
            f"{error}; cancelling also failed: {silent}. When Slurm answers again, run trnslurm "
            f"cancel {runs[0].name}"
        ) from None


def _cancel_all(runs: Sequence[RunDir], slurm: Slurm, *, looking: bool) -> SlurmError | None:
    """Cancel the known jobs and, if `looking`, other queued ones; return the error if any."""
    records = [(run, run.record()) for run in runs]
    known = {job for _, record in records for job in record.jobs.values()}
    silent: SlurmError | None = None
    for wait_s in _LOOKS_S if looking else (0,):
        time.sleep(wait_s)
        try:
            places = [str(run.path) for run, _ in records]
            found = slurm.jobs_in(places, records[0][1].user) if looking else []
            jobs = known | set(found)
            if jobs:
                slurm.cancel(sorted(jobs, reverse=True))
            silent = None
            if jobs - known:
                break
        except SlurmError as why:
            silent = why
    return silent
