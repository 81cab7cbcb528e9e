"""Chooses the scheduler of a run or of a cluster; the only place that does."""

from __future__ import annotations

from collections.abc import Sequence

from trnslurm.config.schema import Cluster
from trnslurm.records.run import Record, RunDir
from trnslurm.schedulers.interface import Scheduler
from trnslurm.schedulers.local.scheduler import ThisMachine
from trnslurm.schedulers.slurm.scheduler import SlurmScheduler


def scheduler_of(place: Record | Cluster | None) -> Scheduler:
    """Return the scheduler of a run or of a cluster profile; of None, the one on PATH."""
    if place is None:
        return SlurmScheduler()
    if place.scheduler == ThisMachine.name:
        return ThisMachine()
    return SlurmScheduler(place.bin_dir if isinstance(place, Record) else place.slurm.bin_dir)


def by_scheduler(
    records: Sequence[tuple[RunDir, Record]],
) -> dict[Scheduler, list[tuple[RunDir, Record]]]:
    """Return the runs of each scheduler, which is asked about them at once."""
    found: dict[Scheduler, list[tuple[RunDir, Record]]] = {}
    for run, record in records:
        found.setdefault(scheduler_of(record), []).append((run, record))
    return found
