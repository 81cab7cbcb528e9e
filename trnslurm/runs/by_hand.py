"""Messages about a bundle that was started with sbatch or bash, without trnslurm."""

from __future__ import annotations

import shlex

from trnslurm.contract.states import State
from trnslurm.errors import RunError
from trnslurm.records.run import ByHand, Record, RunDir
from trnslurm.schedulers.choice import scheduler_of

UNKNOWN = "started without trnslurm submit, so its jobs in the queue are unknown"


def start_by_hand(run: RunDir, record: Record) -> str:
    """Return the command that starts the first uncompleted phase again."""
    newest = {phase: run.newest_attempt(record, phase) for phase in record.phases}
    done = [phase for phase, last in newest.items() if last and last.state is State.COMPLETED]
    phase = next((p for p in record.phases if p not in done), record.phases[-1])
    script, start = run.script(phase).name, scheduler_of(record).starts_with
    return f"cd {shlex.quote(str(run.path))} && {start} {script}"


def refuse_by_hand(run: RunDir, record: Record, instead: str) -> None:
    """Refuse to change a run that trnslurm did not submit. `instead` says what to do."""
    if isinstance(record, ByHand):
        raise RunError(f"{run.path} was started without trnslurm submit: {instead}")
