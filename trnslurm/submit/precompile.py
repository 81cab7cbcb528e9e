"""Decides whether a run begins with a precompile job: never twice for one key, whoever asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trnslurm.cluster.cache import PRECOMPILE, CompileCache, Compiled, still_compiles
from trnslurm.node.graphs.claims import Claim, newest_claim
from trnslurm.plan.spec import COMPILING
from trnslurm.submit.job import Job, Link

Verdict = Literal["none", "never", "asked", "unknown", "cold", "warm", "elsewhere", "before"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Whether a job's graphs must be compiled before it trains."""

    job: Job
    verdict: Verdict
    """none: nothing to compile ahead; never, asked: as precompile says; unknown: to this host;
    cold; warm; elsewhere: another run compiles them; before: a run of the chain ahead does."""
    compiled: Compiled = field(default_factory=Compiled)
    versions: Mapping[str, str] = field(default_factory=dict)
    other: Claim | None = None
    """Of the run that compiles them."""

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that are submitted."""
        if self.verdict in ("warm", "elsewhere", "before"):
            return tuple(p for p in self.job.phases if p != PRECOMPILE)
        return self.job.phases

    @property
    def limit_node_hours(self) -> float:
        """Node-hours if every phase ran into its time limit."""
        return sum(self.job.time_min.get(p, 0) for p in self.phases) / 60 * self.job.nodes

    @property
    def left_out(self) -> str:
        """Why there is no precompile phase; empty if there is one, or nothing to compile."""
        key = self.compiled.key
        if self.verdict == "warm" and self.compiled.manifest:
            return f"its graphs are compiled (key {key})"
        if self.verdict == "elsewhere" and self.other:
            holder = self.other.holder
            return f"{Path(holder.run).name} of {holder.user} compiles its graphs (key {key})"
        if self.verdict == "before":
            return f"a run before it compiles its graphs (key {key})"
        return "as asked" if self.verdict == "never" else ""

    def record(self) -> dict[str, Any]:
        """Return what run.json has of it."""
        if self.verdict == "none":
            return {}
        facts = {
            "key": self.compiled.key,
            "versions": dict(self.versions),
            "left_out": self.left_out,
            "waits_for": self.other.holder.job if self.other else "",
        }
        return {name: value for name, value in facts.items() if value}


def needs_of(links: Sequence[Link], cache: CompileCache) -> list[Need]:
    """Say what the jobs of a chain need as things stand."""
    needs: list[Need] = []
    for link in links:
        needs.append(need_of(link.job, cache, before={n.compiled.key for n in needs}))
    return needs


def need_of(job: Job, cache: CompileCache, *, before: Collection[str] = ()) -> Need:
    """Say what a job needs as things stand; `before`: keys of the runs ahead in its chain."""
    if PRECOMPILE not in job.phases:
        ahead = job.precompile == "never" and (job.ingredients or {}).get("device") in COMPILING
        return Need(job=job, verdict="never" if ahead else "none")
    if job.ingredients is None:
        problem = "the bundle does not say what shapes its graphs"
        compiled = Compiled(problem=problem, known=False)
        return Need(job=job, verdict="unknown", compiled=compiled)
    compiled = cache.look_up(job.ingredients)
    known = Need(job=job, verdict="cold", compiled=compiled, versions=cache.versions)
    if job.precompile == "always":
        return replace(known, verdict="asked")
    if not compiled.known:
        return replace(known, verdict="unknown")
    if compiled.warm:
        return replace(known, verdict="warm")
    if compiled.key in before:
        return replace(known, verdict="before")
    claim = newest_claim(cache.root, compiled.key)
    # What is compiled by somebody who is not trusted would be refused.
    if claim and cache.trusts(claim.uid) and still_compiles(claim, cache.bin_dir):
        return replace(known, verdict="elsewhere", other=claim)
    return known
