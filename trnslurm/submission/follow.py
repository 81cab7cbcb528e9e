"""`submit --each-checkpoint-of RUN`: a bundle in follow/ of the run, and a run per checkpoint.

trnslurm.node.follow creates these runs: on the first node while the run is training, or here if it
has ended, for the checkpoints that it left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trnslurm.contract.checkpoints import exported_in
from trnslurm.contract.files import write_json
from trnslurm.contract.variables import Variable
from trnslurm.errors import ConfigError, SubmitError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import refuse_foreign, refuse_writable_code
from trnslurm.records.run import RunDir
from trnslurm.runs.git import git_source
from trnslurm.runs.status import run_status
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.submission.record import new_record
from trnslurm.submission.submission import Submission
from trnslurm.submission.submit import privacy_of

_LOOK_S = 300.0


class Rule(Frozen):
    """Which checkpoints of a run get a run of their own."""

    run: RunDir
    every: int = 0
    """Use the first checkpoint at or after each multiple of this many steps, or all if 0."""
    at_most: int = 1
    """How many of these jobs may run at a time."""
    metric: str = ""
    """The metric that selects the best checkpoint, or empty to keep no checkpoint."""
    highest: bool = False
    """Whether the best checkpoint has the highest value."""
    patience: int = 0
    """The number of newer checkpoints without a better value that ends the run; 0 for never."""

    @classmethod
    def of(
        cls, run: RunDir, *, lowest: str | None, highest: str | None, patience: int, **rule: int
    ) -> Rule:
        """Return a rule with the metric that a user requested, if any."""
        if lowest and highest:
            raise ConfigError("--lowest and --highest: name one metric, and one of the two options")
        if patience and not (lowest or highest):
            raise ConfigError(
                "--patience requires --lowest METRIC or --highest METRIC to compare checkpoints"
            )
        metric = lowest or highest or ""
        return cls(run=run, metric=metric, highest=bool(highest), patience=patience, **rule)

    def facts(self) -> dict[str, Any]:
        """Return the content of rule.json."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "run"}


def follow(submission: Submission, rule: Rule, command: Sequence[str]) -> Path:
    """Put a job's bundle into follow/ of the run, start the jobs due, and return the directory."""
    planned = submission.runs[0]
    assert planned.need is not None
    job, run = planned.job, rule.run
    if planned.need.phases != ("train",):
        raise SubmitError("--each-checkpoint-of: the job's graphs cannot be compiled in advance: "
                          "pass --precompile never")  # fmt: skip
    place = run.follow / job.name
    if place.exists():
        raise SubmitError(
            f"{run.name} already has a job named {job.name} for its checkpoints: choose another "
            f"--name, or remove {place}"
        )
    new = place.with_name(f".{job.name}.new")
    with privacy_of(job):
        _write(submission, rule, command, new)
    if run_status(run).final:
        look(run, RunDir(place).python_path, job.profile.slurm.bin_dir)
    return place


def _write(submission: Submission, rule: Rule, command: Sequence[str], new: Path) -> None:
    """Write the bundle, its record and its rule. The directory appears once it is complete."""
    planned, place = submission.runs[0], rule.run.follow / submission.job.name
    job = planned.job
    assert planned.need is not None
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        job.bundle.write(new)
        git, patch = git_source(Path(job.source_dir)) if job.source_dir else (job.git, job.patch)
        if patch:
            RunDir(new).patch_file.write_bytes(patch)
        record = new_record(RunDir(place), planned, planned.need, git, command)
        RunDir(new).write_record(replace(record, run=job.name))
        rule_file = new / rule.run.rule_file(job.name).name
        write_json(rule_file, rule.facts())
        new.rename(place)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise SubmitError(f"cannot write {place} ({error.strerror})") from None


def check(rule: Rule, submission: Submission) -> None:
    """Reject jobs and runs that do not work with --each-checkpoint-of."""
    job, record = submission.job, rule.run.record()
    if not job.has_queue or not scheduler_of(record).has_queue or record.inside:
        where = f"{rule.run.name} runs on this machine" if job.has_queue else job.scheduler.words
        raise SubmitError(f"--each-checkpoint-of requires Slurm jobs: {where}")
    if job.project is None:
        raise SubmitError(
            f"--each-checkpoint-of requires a script or a command: the recipe {job.recipe} does "
            "not accept {checkpoint}"
        )
    if exported_in(job.script("train").decode(errors="replace"), Variable.EXPORT):
        _check_export(rule.run)


def _check_export(run: RunDir) -> None:
    """Reject a run that has no export.py of its own, or whose export.py others may change."""
    if run.project_file.exists():
        raise SubmitError(
            f"{{export}}: {run.name} runs a custom script, which saves in its own format: use "
            "{checkpoint}, which is a Hugging Face folder if the script saves one"
        )
    recipe = run.record().recipe
    if not (run.code / "jobs" / recipe / "export.py").is_file():
        raise SubmitError(
            f"{{export}}: {recipe} has no export.py, so the checkpoints of {run.name} cannot be "
            "exported: use {checkpoint}"
        )
    refuse_foreign(run.path, "export")
    refuse_writable_code(run.path)


def look(run: RunDir, python_path: str, bin_dir: str | None) -> None:
    """Start the runs for checkpoints that have none yet, using the code of a bundle."""
    path = os.pathsep.join(filter(None, (bin_dir, os.environ.get("PATH"))))
    command = [sys.executable, "-m", "trnslurm.node.follow", str(run.path)]
    environ = os.environ | {"PATH": path, "PYTHONPATH": python_path}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(
            f"{run.name}: Slurm did not accept the job for a checkpoint within {_LOOK_S:g} s"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubmitError(f"{run.name}: the job for a checkpoint was not started: {last}")
