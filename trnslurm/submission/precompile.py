"""Decides whether a run needs a precompile job, and plans those for other node counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from trnslurm.cluster.cache import PRECOMPILE, CompileCache, Compiled
from trnslurm.cluster.claims import Claim
from trnslurm.config.schema import Config
from trnslurm.devices import DEVICES
from trnslurm.errors import ConfigError, PlanError
from trnslurm.frozen import Frozen
from trnslurm.plan.spec import JobSpec, check_job_name, make_spec
from trnslurm.submission.job import Job, make_job

DECIDED_THERE = "the other host checks when the submission arrives"
Decision = Literal["none", "never", "asked", "unknown", "cold", "warm", "compiling", "before"]


class Need(Frozen):
    """Whether a job's graphs must be compiled before it trains."""

    job: Job
    decision: Decision
    """The state of the graphs, or the reason for the decision.

      none         there is nothing to compile
      never, asked the recipe's `precompile` key decides
      unknown      this host cannot find out
      cold         not compiled
      warm         compiled
      compiling    being compiled by another run
      before       compiled by another run of this submission
    """
    compiled: Compiled = field(default_factory=Compiled)
    versions: Mapping[str, str] = field(default_factory=dict)
    other: Claim | None = None
    """The claim of the run that compiles them."""
    job_before: str = ""
    """The job that compiles them, in another run of the same sweep."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the phases to submit, or none if a precompile-only job already has its graphs."""
        if self.decision in ("warm", "compiling", "before"):
            return tuple(p for p in self.job.phases if p != PRECOMPILE)
        return self.job.phases

    @property
    def limit_node_hours(self) -> float:
        """Return the node-hours used if every phase reaches its time limit."""
        return sum(self.job.limit_node_hours(phase) for phase in self.phases)

    @property
    def words(self) -> str:
        """The state of the job's graphs in words."""
        key = f" (key {self.compiled.key})" if self.compiled.key else ""
        if self.decision == "compiling" and self.other:
            holder = self.other.holder
            job = f", job {holder.job}" if holder.job and "@" not in holder.job else ""
            return f"being compiled{key} by {Path(holder.run).name} of {holder.user}{job}"
        if self.decision == "before":
            return f"compiled by another run of this submission{key}"
        return self.compiled.words

    @property
    def left_out(self) -> str:
        """Return why there is no precompile phase; empty if there is one or nothing to compile."""
        if self.decision in ("warm", "compiling", "before"):
            return f"its graphs are {self.words}"
        return "--precompile never" if self.decision == "never" else ""

    def record(self) -> dict[str, Any]:
        """Return the facts for run.json."""
        if self.decision == "none":
            return {}
        facts = {
            "key": self.compiled.key,
            "versions": dict(self.versions),
            "left_out": self.left_out,
            "waits_for": self.other.holder.job if self.other else self.job_before,
        }
        return {name: value for name, value in facts.items() if value}


def graphs_of(job: Job) -> str:
    """Return a string that is equal for jobs with the same graphs, and for jobs without graphs."""
    return json.dumps(job.ingredients if PRECOMPILE in job.phases else None, sort_keys=True)


def need_of(job: Job, cache: CompileCache | None) -> Need:
    """Return what a job currently needs. Without a cache, the --on host decides."""
    if PRECOMPILE not in job.phases:
        device = DEVICES.get(str((job.ingredients or {}).get("device")))
        ahead = job.precompile == "never" and device and device.compiles_ahead
        return Need(job=job, decision="never" if ahead else "none")
    if job.ingredients is None:
        problem = "the bundle does not list what determines its graphs"
        compiled = Compiled(problem=problem, known=False)
        return Need(job=job, decision="unknown", compiled=compiled)
    if cache is None:
        asked: Decision = "asked" if job.precompile == "always" else "unknown"
        return Need(job=job, decision=asked, compiled=Compiled(problem=DECIDED_THERE, known=False))
    compiled = cache.look_up(job.ingredients)
    known = Need(job=job, decision="cold", compiled=compiled, versions=cache.versions)
    if job.precompile == "always":
        return replace(known, decision="asked")
    if not compiled.known:
        return replace(known, decision="unknown")
    if compiled.warm:
        return replace(known, decision="warm")
    claim = cache.newest_claim(compiled.key)
    # Graphs compiled by an untrusted user would be refused.
    if claim and cache.trusts(claim.uid):
        from trnslurm.cluster.cache_use import still_compiles  # few keys have a claim

        if still_compiles(claim, cache):
            return replace(known, decision="compiling", other=claim)
    return known


def precompile_jobs(
    config: Config, spec: JobSpec, counts: Sequence[int], template_dirs: Sequence[Path]
) -> list[Job]:
    """Return a precompile-only job for each additional node count of a run, or reject a count.

    The run can then resume on these node counts at once.
    """
    if PRECOMPILE not in spec.phases:
        raise ConfigError(f"--compile-for: nothing is compiled in advance for {config.title} here")
    jobs = []
    for nodes in counts:
        if nodes == spec.nodes:
            continue
        try:
            other = make_spec(config, nodes)
        except (PlanError, ConfigError) as error:
            raise ConfigError(f"--compile-for {nodes}: {error}") from None
        if other.batch.global_batch != spec.batch.global_batch:
            raise ConfigError(
                f"--compile-for {nodes}: the global batch grows with the number of nodes "
                "(batch.mode per_worker), so the run cannot continue there"
            )
        time_min = {phase: t for phase, t in other.time_min.items() if phase == PRECOMPILE}
        name = check_job_name(f"{spec.name}-{PRECOMPILE}-{nodes}")
        compile_only = replace(
            other, name=name, phases=(PRECOMPILE,), time_min=time_min, estimate=None
        )
        jobs.append(make_job(compile_only, template_dirs))
    return jobs
