"""The lines of plan and submit about the size and cost of jobs, and whether graphs are compiled."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.cluster.cache import CompileCache, Compiled, compile_hours
from trnslurm.config.search import Workspace
from trnslurm.contract.rundir import INGREDIENTS
from trnslurm.node.hosts import brief
from trnslurm.plan.spec import JobSpec, precompile_min
from trnslurm.runs.roles import nodes_told, without_price
from trnslurm.runs.tables import count, dollars, ends_of, hours, text_table

if TYPE_CHECKING:
    from trnslurm.contract.halving import Halving
    from trnslurm.schedulers.interface import HeldJob
    from trnslurm.submission.job import Job  # plan imports no submit
    from trnslurm.submission.precompile import Need
    from trnslurm.submission.submission import Submission

_SHORT_HOURS = 1 / 6
_IN_WORDS = {"warm": "compiled", "compiling": "being compiled"}


def submission_lines(submission: Submission, *, remote: bool) -> Iterator[str]:
    """Yield what a submission starts and costs. A remote host prints its own lines about graphs."""
    if submission.sweep:
        yield from _sweep_lines(submission)
        return
    for need in submission.needs:
        yield _held_line(need.job, submission.held) if submission.held else _size_line(need)
        about = (
            *(_lightning_line, _mpi_line),
            *(_project_line, _above_line, _python_line, _variables_line),
        )
        yield from filter(None, (line(need.job) for line in about))
        if not remote and (line := _graphs_line(need, submission.cache)):
            yield line
    if not remote:
        yield from _extras_lines(submission)


def graphs_lines(submission: Submission) -> Iterator[str]:
    """Yield which of a submission's graphs are compiled and which have to be compiled."""
    for need in submission.needs:
        if line := _graphs_line(need, submission.cache):
            yield line
    yield from _extras_lines(submission)


def _extras_lines(submission: Submission) -> Iterator[str]:
    for extra in submission.extras:
        if extra.need:
            yield _other_graphs_line(extra.need, submission.cache)


def name_and_place(job: Job) -> str:
    """Return a run's name and its nodes, as submit prints them."""
    name = job.recipe + (f" ({job.preset})" if job.preset else "")
    each = job.workers_per_node
    workers = f", {count(each, 'worker')} per node" if each else ""
    if not job.has_queue:
        nodes = count(job.nodes, "node")
        return f"{name} on this machine, as {nodes} ({job.instance_type}){workers}"
    slurm, spares = job.profile.slurm, job.spare_nodes
    least = f"{slurm.min_nodes}-" if slurm.min_nodes else ""
    more = f" and {count(spares, 'spare')}" if spares else ""
    more += nodes_told(job.roles)
    return f"{name} on {least}{job.nodes} x {job.instance_type}{more}{workers}"


def _held_line(job: Job, held: HeldJob) -> str:
    """Return the line about the job that the user holds and the nodes of it that a run uses."""
    these = f"{len(held.hosts)} of its {count(held.nodes, 'node')}"
    where = f"job {held.job_id}, on {these}: {brief(held.hosts)}"
    ends = "" if held.ends == "Unknown" else f"; the job ends {held.ends}"
    return f"{name_and_place(job)}: in {where}{ends}"


def _size_line(need: Need) -> str:
    line, about = name_and_place(need.job), ""
    if not need.job.has_queue:
        return line
    if (e := need.job.estimate) is not None:
        about = f"about {hours(e.hours)} h, {hours(e.node_hours)} node-hours, {dollars(e.cost)}"
        about += without_price(need.job.roles) if e.cost is not None else ""
        about += " (a guess; `plan` explains it); " if e.guess else "; "
    return f"{line}: {about}{_at_most(need.limit_node_hours, 'its')}{_cap(need.job)}"


def _at_most(limit: float, whose: str) -> str:
    """Return the node-hours that time limits allow, in words. A batch script may set no limit."""
    if not limit:
        return f"the partition sets {whose} time limit"
    return f"at most {hours(limit)} node-hours within {whose} time limits"


def _cap(job: Job) -> str:
    """Return the limits on all attempts together, in words."""
    caps = job.caps
    more = [f"{caps['node_hours']:g} node-hours"] if "node_hours" in caps else []
    more += [f"{caps['attempts']:g} attempts"] if "attempts" in caps else []
    return f", {' and '.join(more)} over all attempts" if more else ""


def _project_line(job: Job) -> str:
    """Return the line about which files of a custom script's project are submitted."""
    if job.project is None:
        return ""
    from trnslurm.render.project import PROJECT_CODE  # imports hashlib

    sizes = [len(data) for name, data in job.bundle.files.items() if name.startswith(PROJECT_CODE)]
    line = f"with {count(len(sizes), 'file')} ({sum(sizes) / 2**20:.1f} MiB)"
    if job.source_dir:
        line += f" of {job.source_dir}"
    # A hidden file is seldom what a script reads.
    if left_out := sorted(job.project["left_out"], key=lambda name: "/." in f"/{name}"):
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        line += f", not {', '.join(left_out[:3])}{more} (.gitignore, or hidden)"
    large = job.project.get("large", [])
    if links := [name for name in job.project["links"] if name not in large]:
        line += f"; links to {', '.join(links)}"
    if large:
        more = f" and {len(large) - 3} more" if len(large) > 3 else ""
        line += f"; links to {', '.join(large[:3])}{more}, too large to copy"
    return f"{line}; the script runs in a copy of these files, work/ in the run directory"


def _above_line(job: Job) -> str:
    """Return a warning about paths that a custom script names and its copy will not contain."""
    above = (job.project or {}).get("above", [])
    if not above:
        return ""
    file, name = above[0]
    more = f" and {len(above) - 1} more" if len(above) > 1 else ""
    return (
        f"{file} names {name}{more}, which is above the project and missing from the copy in "
        "which the script runs. Use an absolute path, or submit from a directory that contains "
        "both"
    )


def _python_line(job: Job) -> str:
    """Return a note that a custom script's Slurm job does not use this shell's environment."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    profile = job.profile
    ours = job.project is not None and not (job.is_here or profile.activate)
    if not ours or not active or profile.container.image:
        return ""
    if os.environ.get("CONDA_DEFAULT_ENV") == "base" or _is_below(profile.python, active):
        return ""
    return (
        f"The job uses the profile's Python, {profile.python}, not the active environment's. To "
        f"change that, pass --set python={shlex.quote(f'{active}/bin/python')}"
    )


def _is_below(python: str, environment: str) -> bool:
    """Check whether an interpreter is in an environment. It may be a link that points outside."""
    return Path(python).parent.resolve() == (Path(environment) / "bin").resolve()


def _variables_line(job: Job) -> str:
    """Return the variables of this shell that a custom script reads but its job does not get.

    This includes variables that its libraries read. A batch script gets all variables of the shell.
    """
    if job.project is None or job.profile.slurm.directives is not None:
        return ""
    from trnslurm.config.values import for_libraries
    from trnslurm.render.project import variables_read

    there = {name for name in variables_read(job.bundle.files) if name in os.environ}
    if not (lacking := sorted(there.union(for_libraries(os.environ)) - job.profile.env.keys())):
        return ""
    copies = " ".join(f"--env {name}" for name in lacking)
    return f"The job does not get this shell's variables unless you name them: {copies}"


def _lightning_line(job: Job) -> str:
    """Return a warning that a custom script seems to set Lightning's Trainer up for one node."""
    if job.project is None or job.nodes == 1 or job.profile.slurm.directives is not None:
        return ""
    from trnslurm.render.project import one_node_in

    file, word = one_node_in(job.bundle.files, job.project.get("entry", ""), job.nodes)
    if not file:
        return ""
    add = f"add {word} to the arguments, or " if word else ""
    return (
        f"{file} sets num_nodes to 1, so Lightning's Trainer would train separately on each node: "
        f"{add}remove the setting, because trnslurm passes the number of nodes to Lightning"
    )


def _mpi_line(job: Job) -> str:
    """Return a warning that a custom script reads its rank from MPI, which nothing sets up."""
    slurm = job.profile.slurm
    if job.project is None or not job.has_queue or slurm.directives is not None:
        return ""
    if job.nodes * job.workers_per_node == 1:
        return ""
    from trnslurm.render.project import imports_mpi

    told = any(option.startswith("--mpi=") for option in slurm.srun)
    if told or not imports_mpi(job.bundle.files, job.project.get("entry", "")):
        return ""
    return (
        "mpi4py sees a world of one process in each worker unless srun sets up MPI. Pass "
        "--launcher srun --set 'slurm.srun=[--mpi=pmix]' with one of the types that `srun "
        "--mpi=list` prints, unless the site's srun does so by default"
    )


def _sweep_lines(submission: Submission) -> Iterator[str]:
    """Yield the values and the cost of each run of a sweep, and the cost of all runs together."""
    jobs = [run.job for run in submission.runs]
    job = jobs[0]
    turns = f", {submission.at_most} at a time" if submission.at_most else ""
    yield from (f"{count(len(jobs), 'run')} of {name_and_place(job)}{turns}:", "")
    yield from ends_of([*text_table(*_costs(submission), right="run,hours,node-hours,cost")])
    yield ""
    needs = [need for need in submission.needs if need.decision != "before"]
    yield from dict.fromkeys(filter(None, (_graphs_line(n, submission.cache) for n in needs)))
    if submission.halving:
        yield from _rung_lines(submission, submission.halving)
    if job.has_queue:
        yield in_all(submission)


def _rung_lines(submission: Submission, halving: Halving) -> Iterator[str]:
    """Yield the rungs of a sweep, and how much of the full sweep they use."""
    run_hours = [e.node_hours for planned in submission.runs if (e := planned.job.estimate)]
    whole = sum(run_hours, 0.0) if len(run_hours) == len(submission.runs) else None
    full = halving.rungs[0].runs * halving.rungs[-1].stop_at
    rows, done = [], 0
    for number, rung in enumerate(halving.rungs, 1):
        steps = rung.runs * (rung.stop_at - done)
        row = [str(number), f"{rung.runs:,}", f"{rung.stop_at:,}", f"{steps:,}"]
        rows.append([*row, hours(whole * steps / full)] if whole else row)
        done = rung.stop_at
    header = ["rung", "runs", "to step", "steps", *(["node-hours"] if whole else [])]
    yield from text_table(header, rows, right=",".join(header))
    share = f"{halving.steps:,} steps instead of {full:,}: {100 * halving.share:.0f} %"
    if whole:
        share += f", {hours(whole * halving.share)} node-hours instead of {hours(whole)}"
    yield from ("", share)


def _costs(submission: Submission) -> tuple[list[str], list[list[str]]]:
    keys = list(dict.fromkeys(key for run in submission.runs for key in run.values))
    header = ["run", *keys]
    rows = [
        [str(number), *(run.values.get(key, "-") for key in keys)]
        for number, run in enumerate(submission.runs, 1)
    ]
    expected = [run.job.estimate for run in submission.runs]
    if any(expected):
        header += ["hours", "node-hours", "cost"]
        for row, e in zip(rows, expected, strict=True):
            row += [hours(e.hours), hours(e.node_hours), dollars(e.cost)] if e else ["-"] * 3
    if any(need.decision not in ("none", "never") for need in submission.needs):
        header.append("graphs")
        names = [submission.name_of(run) for run in submission.runs]
        for row, run, need in zip(rows, submission.runs, submission.needs, strict=True):
            if need.decision == "before":
                row.append(f"as run {names.index(run.waits_for.graphs) + 1}")
            else:
                row.append(_IN_WORDS.get(need.decision, "precompile"))
    return header, rows


def in_all(submission: Submission) -> str:
    """Return the total cost of all runs."""
    expected = [run.job.estimate for run in submission.runs]
    known = [estimate for estimate in expected if estimate]
    about = ""
    share = submission.halving.share if submission.halving else 1.0
    if len(known) == len(expected):
        prices = [estimate.cost for estimate in known if estimate.cost is not None]
        cost = dollars(share * sum(prices) if len(prices) == len(known) else None)
        cost += without_price(submission.runs[0].job.roles) if prices else ""
        about = f"about {hours(share * sum(e.node_hours for e in known))} node-hours, {cost}; "
    limit = sum(need.limit_node_hours for need in submission.needs)
    for rung in submission.halving.rungs[1:] if submission.halving else ():
        limit += rung.runs * submission.job.limit_node_hours("train")
    cap = _cap(submission.runs[0].job)
    return f"In all: {about}{_at_most(limit, 'the')}{cap}"


def _graphs_line(need: Need, cache: CompileCache) -> str:
    """Return the line about one job's graphs, or an empty string if it needs no precompile."""
    manifest = need.compiled.manifest
    if need.decision == "none":
        return ""
    if need.decision == "never":
        return "Graphs: no precompile (--precompile never); they are compiled during training"
    if need.decision == "warm" and manifest:
        return (
            f"Graphs: {need.words}, so no precompile job; "
            f"that saves {_nodes_time(compile_hours(manifest), len(manifest.nodes))}"
        )
    if need.decision == "compiling":
        return f"Graphs: {need.words}; training waits for that job"
    if need.decision == "before":
        return f"Graphs: {need.words}, so no precompile job"
    limit = need.job.time_min.get("precompile", 0) / 60 * need.job.nodes
    cost = _expected_cost(cache, need.job.ingredients or {}, need.job.nodes, limit)
    return f"Graphs: {need.words}; precompile first{cost and f', {cost}'}"


def _other_graphs_line(need: Need, cache: CompileCache) -> str:
    """Return the line about one node count of --compile-for."""
    line = f"Graphs on {count(need.job.nodes, 'node')}: {need.words}"
    if not need.phases:
        return line
    cost = _expected_cost(cache, need.job.ingredients or {}, need.job.nodes, need.limit_node_hours)
    return f"{line}; precompile in a separate job{cost and f', {cost}'}"


def _expected_cost(
    cache: CompileCache, ingredients: Mapping[str, Any], nodes: int, limit: float
) -> str:
    """Return the expected cost of a compilation and its source, or an empty string if unknown."""
    if like := cache.most_alike(ingredients):
        cost = _nodes_time(compile_hours(like), nodes)
        return f"about {cost} (as for key {like.key} of this recipe)"
    return f"at most {hours(limit)} node-hours (its time limit)" if limit else ""


def plan_lines(specs: Sequence[JobSpec], workspace: Workspace) -> Iterator[str]:
    """Yield, for each node count, whether its graphs are compiled and what compiling costs."""
    specs = [spec for spec in specs if "precompile" in spec.phases]
    if not specs:
        return
    cache = CompileCache(specs[0].config.cluster)
    if cache.unknown:
        cost = _limit_of_a_node(specs[0])
        words = Compiled(problem=cache.unknown, known=False).words
        yield f"Graphs: {words}{cost and f'; precompile {cost}'}"
        return
    for spec in specs:
        ingredients = ingredients_of(spec, workspace)
        found = cache.look_up(ingredients)
        where = f"Graphs on {count(spec.nodes, 'node')}"
        if found.warm:
            yield f"{where}: {found.words}"
            continue
        limit = precompile_min(spec.config) / 60 * spec.nodes if spec.has_queue else 0.0
        cost = _expected_cost(cache, ingredients, spec.nodes, limit)
        yield f"{where}: {found.words}{cost and f'; precompile {cost}'}"


def graphs_facts(specs: Sequence[JobSpec], workspace: Workspace) -> Iterator[dict[str, Any]]:
    """Yield the state of the graphs for each node count for --json, null if unknown here."""
    cache = CompileCache(specs[0].config.cluster)
    for spec in specs:
        if "precompile" not in spec.phases:
            yield {"graphs": None}
        elif cache.unknown:
            yield {"graphs": {"key": None, "compiled": None, "unknown": cache.unknown}}
        else:
            found = cache.look_up(ingredients_of(spec, workspace))
            compiled = found.warm if found.known else None
            unknown = "" if found.known else found.problem
            yield {"graphs": {"key": found.key, "compiled": compiled, "unknown": unknown}}


def ingredients_of(spec: JobSpec, workspace: Workspace) -> Mapping[str, Any]:
    """Return everything that a job's graph key is computed from."""
    from trnslurm.render.job import render_job  # imported only when something is rendered

    bundle = render_job(spec, workspace.template_dirs())
    return dict(json.loads(bundle.files[INGREDIENTS]))


def _limit_of_a_node(spec: JobSpec) -> str:
    if not spec.has_queue:
        return ""
    limit = hours(precompile_min(spec.config) / 60)
    return f"at most {limit} hours on each node (its time limit)"


def _nodes_time(hours_each: float, nodes: int) -> str:
    if hours_each < _SHORT_HOURS:
        where = "1 node" if nodes == 1 else f"each of {nodes} nodes"
        return f"{hours_each * 3600:.0f} s on {where}"
    return f"{hours(hours_each * nodes)} node-hours"


def age(seconds: float) -> str:
    """Format a duration for a table."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def age_since(moment: float) -> str:
    """Format the time since a moment for a table."""
    return age(time.time() - moment)
