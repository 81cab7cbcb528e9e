"""The rungs of a sweep, as seen from its runs: which continue, which have stopped, and why."""

from __future__ import annotations

from pathlib import Path

from trnslurm.contract.halving import (
    Halving,
    Place,
    Ranking,
    read_halving,
    read_place,
    read_ranking,
)
from trnslurm.contract.states import State
from trnslurm.errors import SlurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.choice import scheduler_of
from trnslurm.schedulers.interface import Scheduler
from trnslurm.slurm.states import ENDED


class Told(Frozen):
    """The state of an ended run within the rungs of its sweep."""

    state: State
    reason: str
    mend: str = ""
    """The command that continues the run along with the others, or empty if there is none."""


class RungOf(Frozen):
    """A run's rung, and its rank there."""

    rung: int
    rungs: int
    rank: int
    """The run's rank in the rung, once the rung has ended, or 0 if it has none."""
    runs: int
    """The number of runs in the rung."""
    over: bool
    """Whether the rung has been ranked. Runs without a rank do not continue."""


def sweep_of(run: RunDir, record: Record) -> Path:
    """Return the directory of a run's sweep."""
    return run.path.with_name(record.group)


def in_queue(halving: Halving, rung: int, scheduler: Scheduler) -> bool:
    """Check whether the array of a rung may still start runs, assuming so if Slurm is silent."""
    return may_run(halving.rungs[rung - 1].job, scheduler)


def may_run(job: str, scheduler: Scheduler) -> bool:
    """Check whether a job or an array task may still run, assuming so if Slurm is silent."""
    try:
        return bool(job) and not {*scheduler.job_states(job)} <= ENDED.keys()
    except SlurmError:
        return True


class Rungs:
    """The rungs of sweeps. Each is read only once."""

    def __init__(self) -> None:
        self._halvings: dict[Path, Halving | None] = {}
        self._rankings: dict[tuple[Path, int], Ranking | None] = {}
        self._queued: dict[tuple[Path, int], bool] = {}

    def tell(self, run: RunDir, record: Record, state: State) -> Told | None:
        """Return a run's state within its rungs, or None if they add nothing."""
        found = self._of(run, record) if record.group and state.final else None
        if found is None:
            return None
        at, halving = found
        if RunDir(run.path).record().jobs != record.jobs:  # it moved to its next rung meanwhile
            return Told(state=State.REQUEUED, reason="continues in its next rung")
        sweep, words = sweep_of(run, record), at.words
        ranking = self._ranking(sweep, at.rung)
        if state is not State.COMPLETED or at.rung == at.rungs:
            return None
        again = f"trnslurm resume {record.group}"
        number = ranking.rank(run.name) if ranking else 0
        if run.cancelled_file.exists():
            return Told(
                state=State.CANCELLED,
                reason=f"by trnslurm cancel, after {words}",
                mend=again if number or not ranking else "",
            )
        rank = f"rank {number} of {halving.rungs[at.rung - 1].runs}"
        if ranking and not number:
            why = ranking.out.get(run.name, "it ended after the ranking")
            return Told(state=state, reason=f"stopped after {words}: {why}")
        if number > halving.rungs[at.rung].runs:
            return Told(state=state, reason=f"stopped after {words}: {rank}")
        done = f"{rank} in {words}" if ranking else f"{words} is done"
        if not self._waits(sweep, halving, at.rung + 1, record):
            why = f"{done}, but rung {at.rung + 1} is not in the queue"
            return Told(state=State.CANCELLED, reason=why, mend=again)
        then = "continues" if ranking else "will be ranked when the others have ended"
        return Told(state=State.REQUEUED, reason=f"{done}: {then}")

    def rung_of(self, run: RunDir, record: Record) -> RungOf | None:
        """Return the rung of a run, or None if its sweep has no rungs or the run has left them."""
        found = self._of(run, record) if record.group else None
        if found is None:
            return None
        at, halving = found
        ranking = self._ranking(sweep_of(run, record), at.rung)
        return RungOf(
            rung=at.rung,
            rungs=at.rungs,
            rank=ranking.rank(run.name) if ranking else 0,
            runs=halving.rungs[at.rung - 1].runs,
            over=ranking is not None,
        )

    def halving(self, sweep: Path) -> Halving | None:
        """Return the rungs of a sweep."""
        if sweep not in self._halvings:
            self._halvings[sweep] = read_halving(sweep)
        return self._halvings[sweep]

    def _of(self, run: RunDir, record: Record) -> tuple[Place, Halving] | None:
        halving, at = self.halving(sweep_of(run, record)), read_place(run)
        fits = halving and at and 0 < at.rung <= len(halving.rungs)
        return (at, halving) if at and halving and fits else None

    def _ranking(self, sweep: Path, rung: int) -> Ranking | None:
        if (sweep, rung) not in self._rankings:
            self._rankings[sweep, rung] = read_ranking(sweep, rung)
        return self._rankings[sweep, rung]

    def _waits(self, sweep: Path, halving: Halving, rung: int, record: Record) -> bool:
        if (sweep, rung) not in self._queued:
            self._queued[sweep, rung] = in_queue(halving, rung, scheduler_of(record))
        return self._queued[sweep, rung]
