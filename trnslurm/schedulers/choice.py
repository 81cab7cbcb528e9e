"""Chooses the scheduler of a run or of a cluster. No other module does."""

from __future__ import annotations

from collections.abc import Sequence

from trnslurm.config.schema import Cluster
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import Scheduler


def scheduler_of(place: Record | Cluster | None) -> Scheduler:
    """Return the scheduler of a run or a cluster profile; for None, the Slurm on PATH."""
    if place is not None and place.scheduler == "local":
        from trnslurm.schedulers.local.scheduler import ThisMachine  # only the one that is needed

        return ThisMachine()
    from trnslurm.schedulers.slurm.scheduler import SlurmScheduler

    if place is None:
        return SlurmScheduler()
    return SlurmScheduler(place.bin_dir if isinstance(place, Record) else place.slurm.bin_dir)


def by_scheduler(
    records: Sequence[tuple[RunDir, Record]],
) -> dict[Scheduler, list[tuple[RunDir, Record]]]:
    """Group runs by scheduler, so that each scheduler is queried once."""
    found: dict[Scheduler, list[tuple[RunDir, Record]]] = {}
    for run, record in records:
        found.setdefault(scheduler_of(record), []).append((run, record))
    return found
