"""Submission: the runs to start, and the runs that they wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.contract.halving import Halving
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus
from trnslurm.schedulers.interface import HeldJob, WaitsFor
from trnslurm.submission.job import Job
from trnslurm.submission.precompile import Need, graphs_of, need_of


class PlannedRun(Frozen):
    """A run to start: a new run, or a resumed one."""

    job: Job
    waits_for: WaitsFor = WaitsFor()
    values: Mapping[str, str] = field(default_factory=dict)
    """The values that a sweep sets for this run."""
    resumes: RunDir | None = None
    """The directory of an existing run that is resumed."""
    made_of: Mapping[str, str] = field(default_factory=dict)
    """For a stage: everything that affects its result, each with a hash."""
    fetches: str = ""
    """The S3 location of the checkpoint that the run fetches before it trains."""
    ended: RunStatus | None = None
    """The status of the resumed run."""
    need: Need | None = None
    """Whether its graphs must be compiled first, as far as is known before submitting."""


Chain = list[PlannedRun]
"""Runs that each wait for the success of the previous one. Usually a single run."""


class Submission(Frozen):
    """Runs on one cluster, checked as far as this host can. Either all of them start, or none."""

    runs: Sequence[PlannedRun]
    cache: CompileCache
    stamp: str = ""
    """The time stamp in the names of its runs, or empty to use the time of their start."""
    sweep: str = ""
    """The name of its sweep, without the time. Empty if it is not a sweep."""
    pipeline: str = ""
    """The name of its pipeline, without the time. Empty if it is not a pipeline."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Stage of the pipeline -> its run. Stages that are already done are not among these runs."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Stage -> why it runs although it was done before."""
    at_most: int | None = None
    """How many runs of the sweep may run at a time."""
    halving: Halving | None = None
    """The rungs of the sweep, or None if all its runs continue to their last step."""
    held: HeldJob | None = None
    """The job that the user holds, in which the only run starts. None if the runs have own jobs."""
    extras: Sequence[PlannedRun] = ()
    """Runs that compile for additional node counts. If one is rejected, the others still start."""

    @property
    def job(self) -> Job:
        """The job of the first run."""
        return self.runs[0].job

    @property
    def resumes(self) -> bool:
        """Check whether its runs already exist."""
        return self.runs[0].resumes is not None

    @property
    def needs(self) -> list[Need]:
        """What is known about the graphs of its runs."""
        return [planned.need for planned in self.runs if planned.need]

    @property
    def expected_node_hours(self) -> float:
        """The expected node-hours, or those of the time limits if there is no estimate."""
        needs = [planned.need for planned in (*self.runs, *self.extras) if planned.need]
        share = self.halving.share if self.halving else 1.0
        return share * sum(
            need.job.estimate.node_hours if need.job.estimate else need.limit_node_hours
            for need in needs
            if need.phases
        )

    @property
    def chains(self) -> Iterator[Chain]:
        """The runs that start together, because each waits for the success of the previous run."""
        names = {self.name_of(planned) for planned in self.runs if planned.resumes or self.stamp}
        chain: Chain = []
        for planned in self.runs:
            if chain and not self.pipeline and names.isdisjoint(planned.waits_for.success):
                yield chain
                chain = []
            chain.append(planned)
        yield chain

    @property
    def group(self) -> str:
        """The name of its sweep or pipeline, or empty if it is neither."""
        name = self.sweep or self.pipeline
        return f"{self.stamp}-{name}" if name else ""

    def name_of(self, planned: PlannedRun) -> str:
        """Return the name of a run. Before its start, it is known only with a time stamp."""
        return planned.resumes.name if planned.resumes else f"{self.stamp}-{planned.job.name}"


def with_needs(submission: Submission, *, remote: bool) -> Submission:
    """Return the submission with the needs of its runs. Shared graphs are compiled once."""
    cache = None if remote else submission.cache
    runs: list[PlannedRun] = []
    compiling: dict[str, PlannedRun] = {}
    for planned in submission.runs:
        same = compiling.get(graphs_of(planned.job))
        if same and same.need:
            need = replace(same.need, job=planned.job, decision="before")
            graphs = submission.name_of(same)
            planned = replace(planned, waits_for=replace(planned.waits_for, graphs=graphs))
        else:
            need = need_of(planned.job, cache)
        runs.append(replace(planned, need=need))
        if PRECOMPILE in need.phases:
            compiling[graphs_of(planned.job)] = runs[-1]
    extras = [replace(extra, need=need_of(extra.job, cache)) for extra in submission.extras]
    return replace(submission, runs=runs, extras=extras)
