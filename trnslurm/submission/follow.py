"""`submit --each-checkpoint-of RUN`: a bundle in follow/ of the run, a run for each checkpoint.

trnslurm.node.follow makes these runs: on the first node while the run trains, and here, if it has
ended, for the checkpoints that it has.
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
    """The first checkpoint at or after each multiple of so many steps; 0: every checkpoint."""
    at_most: int = 1
    """How many of their jobs run at a time."""
    metric: str = ""
    """By which the best checkpoint is kept; empty: it is not."""
    highest: bool = False
    """Whether the best has the highest value."""
    patience: int = 0
    """The run ends when so many newer checkpoints are no better; 0: it does not end early."""

    @classmethod
    def of(
        cls, run: RunDir, *, lowest: str | None, highest: str | None, patience: int, **rule: int
    ) -> Rule:
        """Return a rule with the metric that a user named, if any."""
        if lowest and highest:
            raise ConfigError("--lowest and --highest: name one metric, and one of the two options")
        if patience and not (lowest or highest):
            raise ConfigError(
                "--patience needs --lowest METRIC or --highest METRIC, by which checkpoints compare"
            )
        metric = lowest or highest or ""
        return cls(run=run, metric=metric, highest=bool(highest), patience=patience, **rule)

    def facts(self) -> dict[str, Any]:
        """Return the contents of rule.json."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "run"}


def follow(submission: Submission, rule: Rule, command: Sequence[str]) -> Path:
    """Put a job's bundle into follow/ of the run, and start what is due; return its directory."""
    planned = submission.runs[0]
    assert planned.need is not None
    job, run = planned.job, rule.run
    if planned.need.phases != ("train",):
        raise SubmitError("--each-checkpoint-of: its graphs cannot be compiled first: pass "
                          "--precompile never")  # fmt: skip
    place = run.follow / job.name
    if place.exists():
        raise SubmitError(
            f"{run.name} already has a job {job.name} for its checkpoints: choose another --name, "
            f"or remove {place}"
        )
    new = place.with_name(f".{job.name}.new")
    with privacy_of(job):
        _write(submission, rule, command, new)
    if run_status(run).final:
        look(run, RunDir(place).python_path, job.profile.slurm.bin_dir)
    return place


def _write(submission: Submission, rule: Rule, command: Sequence[str], new: Path) -> None:
    """Write the bundle, its record and its rule; the directory is there once all is."""
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
        raise SubmitError(f"{place}: cannot be written ({error.strerror})") from None


def check(rule: Rule, submission: Submission) -> None:
    """Refuse what cannot follow a run."""
    job, record = submission.job, rule.run.record()
    if not job.has_queue or not scheduler_of(record).has_queue or record.inside:
        where = f"{rule.run.name} runs on this machine" if job.has_queue else job.scheduler.words
        raise SubmitError(f"--each-checkpoint-of needs jobs of Slurm: {where}")
    if job.project is None:
        raise SubmitError(
            f"--each-checkpoint-of starts a script or a command, and the recipe {job.recipe} "
            "cannot take a {checkpoint}"
        )
    if exported_in(job.script("train").decode(errors="replace"), Variable.EXPORT):
        _check_export(rule.run)


def _check_export(run: RunDir) -> None:
    """Refuse a run without an export.py of its own, or with one that another user may change."""
    if run.project_file.exists():
        raise SubmitError(
            f"{{export}}: {run.name} is of a custom script, which saves in a form of its own: use "
            "{checkpoint}, a Hugging Face folder if the script saves one"
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
    """Start the runs of the checkpoints that have none, with the code of a bundle."""
    path = os.pathsep.join(filter(None, (bin_dir, os.environ.get("PATH"))))
    command = [sys.executable, "-m", "trnslurm.node.follow", str(run.path)]
    environ = os.environ | {"PATH": path, "PYTHONPATH": python_path}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(
            f"{run.name}: Slurm did not accept the job for its checkpoint in time"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubmitError(f"{run.name}: the job for its checkpoint was not started: {last}")
