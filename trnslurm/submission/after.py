"""`submit --after RUN|JOB[:CONDITION]`: waits for the end, success or failure of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trnslurm.console import Console
from trnslurm.contract.states import State
from trnslurm.errors import SubmitError
from trnslurm.runs.find import find_run
from trnslurm.runs.status import run_status
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.slurm.states import ENDED
from trnslurm.submission.job import Job

# https://slurm.schedmd.com/sbatch.html#OPT_dependency
_DEPENDENCY = {"ok": "afterok", "any": "afterany", "failed": "afternotok"}


def find_dependency(word: str, job: Job, roots: Sequence[Path], console: Console) -> str:
    """Return sbatch's dependency for a value of --after, or empty if it is already fulfilled."""
    if not job.has_queue:
        raise SubmitError(f"--after {word}: {job.cluster} is {job.scheduler.words}")
    named, colon, condition = word.rpartition(":")
    if not colon:
        named, condition = word, "ok"
    if condition not in _DEPENDENCY:
        known = ", ".join(f":{name}" for name in _DEPENDENCY)
        raise SubmitError(f"--after {word}: expected {named} with one of {known}")
    if re.fullmatch(r"\d+(_\d+)?", named):
        what, job_id, states = f"job {named}", named, job.scheduler.job_states(named)
        if not states:
            raise SubmitError(f"--after {word}: Slurm has no job {named}")
    else:
        run = find_run(named, [*roots])
        record, status = run.record(), run_status(run)
        if record.inside or not scheduler_of(record).has_queue:
            where = f"in job {record.inside}" if record.inside else "on this machine"
            raise SubmitError(f"--after {word}: {run.name} runs {where} and has no job of its own")
        what, job_id = run.name, record.jobs.get(record.phases[-1], "")
        # STOPPED and LOST are no states of jobs, but ends without success like the others.
        states = [status.state if status.state in ENDED or not status.final else State.FAILED]
    if not {*states} <= ENDED.keys():
        return f"{_DEPENDENCY[condition]}:{job_id}"
    succeeded = {*states} == {State.COMPLETED}
    if condition != "any" and succeeded != (condition == "ok"):
        raise SubmitError(
            f"--after {word}: {what} has ended ({', '.join(dict.fromkeys(states))}), so the run "
            "would never start: omit --after"
        )
    console.say(f"{what} has already ended, so the run does not wait for it")
    return ""
