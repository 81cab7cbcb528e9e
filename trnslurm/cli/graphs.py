"""Lines of plan and submit about a job's graphs: whether they are compiled, and the cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trnslurm.api.tables import count, hours
from trnslurm.cluster.cache import CompileCache, Compiled, compile_hours
from trnslurm.config.search import Workspace
from trnslurm.plan.spec import JobSpec, precompile_min
from trnslurm.rundir import INGREDIENTS

if TYPE_CHECKING:
    from trnslurm.submit.precompile import Need  # plan imports no submit

_SHORT_HOURS = 1 / 6


def graphs_line(need: Need, cache: CompileCache) -> str:
    """Return the line about one job's graphs; empty if the job needs no precompile."""
    manifest = need.compiled.manifest
    if need.decision == "none":
        return ""
    if need.decision == "never":
        return "Graphs: no precompile (--precompile never); training compiles them as it runs"
    if need.decision == "warm" and manifest:
        return (
            f"Graphs: {need.words}, so no precompile job; "
            f"that saves {_nodes_time(compile_hours(manifest), len(manifest.nodes))}"
        )
    if need.decision == "compiling":
        return f"Graphs: {need.words}; training waits for it"
    if need.decision == "before":
        return f"Graphs: {need.words}, so no precompile job"
    limit = need.job.time_min.get("precompile", 0) / 60 * need.job.nodes
    cost = expected_cost(cache, need.job.ingredients or {}, need.job.nodes, limit)
    return f"Graphs: {need.words}; precompile first{cost and f', {cost}'}"


def elastic_graphs_line(need: Need, cache: CompileCache) -> str:
    """Return the line about a node count of --elastic."""
    line = f"Graphs on {count(need.job.nodes, 'node')}: {need.words}"
    if not need.phases:
        return line
    cost = expected_cost(cache, need.job.ingredients or {}, need.job.nodes, need.limit_node_hours)
    return f"{line}; precompile in a separate job{cost and f', {cost}'}"


def expected_cost(
    cache: CompileCache, ingredients: Mapping[str, Any], nodes: int, limit: float
) -> str:
    """Return the expected cost of a compilation and its source; empty if unknown."""
    if like := cache.most_alike(ingredients):
        cost = _nodes_time(compile_hours(like), nodes)
        return f"about {cost} (as key {like.key} of this recipe took)"
    return f"at most {hours(limit)} node-hours (its time limit)" if limit else ""


def plan_lines(specs: Sequence[JobSpec], workspace: Workspace) -> Iterator[str]:
    """Yield for each node count whether its graphs are compiled, and the cost of compiling."""
    specs = [spec for spec in specs if "precompile" in spec.phases]
    if not specs:
        return
    cache = CompileCache(specs[0].config.cluster)
    if cache.unknown:
        cost = _limit_of_a_node(specs[0])
        said = Compiled(problem=cache.unknown, known=False).words
        yield f"Graphs: {said}{cost and f'; precompile {cost}'}"
        return
    for spec in specs:
        ingredients = ingredients_of(spec, workspace)
        found = cache.look_up(ingredients)
        where = f"Graphs on {count(spec.nodes, 'node')}"
        if found.warm:
            yield f"{where}: {found.words}"
            continue
        limit = precompile_min(spec.config) / 60 * spec.nodes if spec.on_slurm else 0.0
        cost = expected_cost(cache, ingredients, spec.nodes, limit)
        yield f"{where}: {found.words}{cost and f'; precompile {cost}'}"


def graphs_facts(spec: JobSpec, cache: CompileCache, workspace: Workspace) -> dict[str, Any]:
    """Return the state of the graphs on one node count for --json; null: unknown on this host."""
    if "precompile" not in spec.phases:
        return {"graphs": None}
    if cache.unknown:
        return {"graphs": {"key": None, "compiled": None, "unknown": cache.unknown}}
    found = cache.look_up(ingredients_of(spec, workspace))
    if not found.known:
        return {"graphs": {"key": found.key, "compiled": None, "unknown": found.problem}}
    return {"graphs": {"key": found.key, "compiled": found.warm, "unknown": ""}}


def ingredients_of(spec: JobSpec, workspace: Workspace) -> Mapping[str, Any]:
    """Return the ingredients of a job's graph key."""
    from trnslurm.render.job import render_job  # imported only when something is rendered

    bundle = render_job(spec, workspace.template_dirs())
    return dict(json.loads(bundle.files[INGREDIENTS]))


def _limit_of_a_node(spec: JobSpec) -> str:
    if not spec.on_slurm:
        return ""
    limit = hours(precompile_min(spec.config) / 60)
    return f"at most {limit} hours on each node (its time limit)"


def _nodes_time(hours_each: float, nodes: int) -> str:
    if hours_each < _SHORT_HOURS:
        where = "1 node" if nodes == 1 else f"each of {nodes} nodes"
        return f"{hours_each * 3600:.0f} s on {where}"
    return f"{hours(hours_each * nodes)} node-hours"


def age(seconds: float) -> str:
    """Return a length of time for a table."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def age_since(moment: float) -> str:
    """Return how long ago a moment was, for a table."""
    return age(time.time() - moment)
