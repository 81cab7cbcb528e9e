"""Starts a run on Slurm: submitit's SlurmExecutor, made to submit rendered bytes."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from trnslurm.errors import SubmitError, TrnslurmError
from trnslurm.run import RunDir
from trnslurm.slurm import Slurm, overriding

_TIMEOUT_S = 60


class RenderedSlurm(SlurmExecutor):
    """Submits a finished script, with options of ours on sbatch's command line."""

    def __init__(self, folder: str, text: str, argv: Sequence[str]) -> None:
        super().__init__(folder)
        self._text, self._argv = text, list(argv)

    @classmethod
    def affinity(cls) -> int:
        return 2  # sbatch was found already; srun need not be on this shell's PATH

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self._argv, str(submission_file_path)]

    def send(self) -> str:
        """Submit, and return Slurm's job id."""
        job_id: str = self._submit_command("").job_id
        return job_id


def start(run: RunDir, slurm: Slurm) -> None:
    """Submit every phase, each to start when the one before it has succeeded."""
    previous = ""
    for phase in run.record().phases:
        try:
            previous = _submit(run, phase, slurm, after=previous)
        except TrnslurmError as error:
            _take_back(run, slurm, str(error))
            raise SubmitError(f"{error} (script kept: {run.script(phase)})") from None
        run.add_job(phase, previous)


def _submit(run: RunDir, phase: str, slurm: Slurm, *, after: str) -> str:
    options = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    argv = ["env", *(f"--unset={name}" for name in overriding(os.environ))]
    argv += ["timeout", str(_TIMEOUT_S), slurm.path("sbatch"), *options]
    text = run.script(phase).read_bytes().decode()
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as scratch,  # what submitit writes down is ours already
        contextlib.chdir(run.path),  # becomes SLURM_SUBMIT_DIR, where the script finds its bundle
        contextlib.redirect_stderr(said),
    ):
        try:
            return RenderedSlurm(scratch, text, argv).send()
        except (FailedJobError, FailedSubmissionError) as error:
            raise SubmitError(_sbatch_words(error)) from None


def _take_back(run: RunDir, slurm: Slurm, reason: str) -> None:
    record = run.record()
    if record.jobs:
        slurm.cancel(list(record.jobs.values()))
    run.write_record(replace(record, refused=reason))


def _sbatch_words(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(cause, subprocess.CalledProcessError) and cause.returncode == 124:
        return (
            f"sbatch: no answer in {_TIMEOUT_S} s; the job may have been accepted all the same: "
            "look at squeue before submitting again"
        )
    words = " ".join(str(error).split()) or "failed without a word"
    return words if words.startswith("sbatch") else f"sbatch: {words}"
