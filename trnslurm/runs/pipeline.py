"""The stages of a pipeline: their order and their states."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus, statuses_of


class StageStanding(Frozen):
    """A stage, and the status of its run."""

    stage: str
    after: tuple[str, ...]
    run: str
    earlier: bool
    """Whether an earlier pipeline has already run it."""
    status: RunStatus | None
    """None if its run was removed or cannot be read."""

    @property
    def state(self) -> str:
        return self.status.state if self.status else "removed"


class PipelineStanding(Frozen):
    """A pipeline and the state of its stages."""

    group: str
    stages: Sequence[StageStanding]

    @property
    def states(self) -> dict[str, int]:
        """Return the number of stages in each state."""
        return dict(collections.Counter(stage.state for stage in self.stages))

    @property
    def final(self) -> bool:
        """Check whether all stages have ended."""
        return all(each.status is None or each.status.final for each in self.stages)

    @property
    def next(self) -> str:
        """The command for stages that ended without completing, or empty if there are none."""
        ended = [s.status for s in self.stages if s.status and s.status.final and s.status.next]
        return next((status.next for status in ended), "")


def is_pipeline(word: str, runs: Sequence[RunDir]) -> bool:
    """Check whether a user's word names a pipeline, rather than one of its stages or a sweep."""
    record = runs[0].record()
    return bool(record.stages) and (len(runs) > 1 or (word != "last" and word in record.group))


def pipeline_of(runs: Sequence[RunDir]) -> PipelineStanding:
    """Return the state of all stages of the pipeline to which these runs belong."""
    record = runs[0].record()
    places = {stage: runs[0].sibling(name) for stage, name in record.stages.items()}
    there = [run for run in places.values() if run.record_file.exists()]
    statuses, _ = statuses_of(there)
    by_run = {status.run: status for status in statuses}
    stages = []
    for stage, run in places.items():
        after: tuple[str, ...] = ()
        group = record.group
        with contextlib.suppress(RunError):
            own = run.record()
            group = own.group
            after = tuple(own.stages_before)
        stages.append(
            StageStanding(
                stage=stage,
                after=after,
                run=run.name,
                earlier=group != record.group,
                status=by_run.get(run.name),
            )
        )
    return PipelineStanding(group=record.group, stages=stages)


def runs_behind(run: RunDir) -> list[RunDir]:
    """Return the runs that wait for a run, directly or indirectly, each after the runs it needs."""
    record = run.record()
    if not record.stages:
        return _chain_behind(run)
    found = [run]
    for other in map(run.sibling, record.stages.values()):
        with contextlib.suppress(RunError):
            awaited = other.record().awaited
            if other not in found and any(each.name in awaited for each in found):
                found.append(other)
    return found[1:]


def _chain_behind(run: RunDir) -> list[RunDir]:
    found = [run]
    with contextlib.suppress(RunError):  # deleted or damaged
        while then := found[-1].record().then:
            found.append(run.sibling(then))
            found[-1].record()
        return found[1:]
    return found[1:-1]
