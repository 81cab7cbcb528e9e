"""submit: make a run from a recipe or from a reviewed bundle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from trnslurm.api.arguments import PathLike, PythonConsole, file_name, flag, wholes
from trnslurm.api.chain import propose_chain
from trnslurm.api.choice import choose_to_submit, spec_of
from trnslurm.api.options import JobOptions, SubmitArguments, SubmitHost, options_of, takes_job
from trnslurm.api.run import Run
from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.console import Console
from trnslurm.errors import ConfigError
from trnslurm.submit.here import check_here, check_notify
from trnslurm.submit.job import make_job, read_job
from trnslurm.submit.precompile import precompile_jobs
from trnslurm.submit.submission import PlannedRun, Submission, with_needs
from trnslurm.submit.submit import submit as start


def propose(options: JobOptions, console: Console, *, elastic: Sequence[int] = ()) -> Submission:
    """Return the run of a recipe, and runs that compile for the node counts of --elastic."""
    options = choose_to_submit(options, console)
    spec = spec_of(options, console)
    cache = CompileCache(spec.config.cluster)
    if PRECOMPILE in spec.phases and not options.host.remote:
        cache.ask_ahead()
    dirs = options.workspace.template_dirs()
    others = precompile_jobs(spec.config, spec, elastic, dirs) if elastic else []
    submission = Submission(
        runs=[PlannedRun(job=make_job(spec, dirs))],
        extras=[PlannedRun(job=job) for job in others],
        cache=cache,
    )
    return checked(submission, options.host, console)


def propose_presets(options: JobOptions, console: Console) -> Submission:
    """Return the runs of a chain of presets."""
    options = choose_to_submit(options, console)
    return checked(propose_chain(options, console), options.host, console)


def propose_bundle(directory: Path, host: SubmitHost, console: Console) -> Submission:
    """Return the run of a reviewed bundle, byte for byte."""
    job = read_job(directory)
    submission = Submission(runs=[PlannedRun(job=job)], cache=CompileCache(job.profile))
    return checked(submission, host, console)


def checked(submission: Submission, host: SubmitHost, console: Console) -> Submission:
    """Check that this host has what the jobs need, and find out which graphs are compiled.

    With --on the remote host does both, when it receives the submission.
    """
    if not host.remote:
        for planned in submission.runs:
            for warning in (*check_here(planned.job), *check_notify(planned.job)):
                console.warn(warning)
    if submission.cache.is_asking and not submission.job.local:
        importlib.import_module("trnslurm.submit.on_slurm")  # as slow as the check of the graphs
    return with_needs(submission, remote=host.remote)


@takes_job(SubmitArguments)
def submit(
    recipe: PathLike | None = None,
    *,
    nodes: int = 1,
    rendered: PathLike | None = None,
    elastic: int | Sequence[int] = (),
    chain: bool = False,
    **job: Unpack[SubmitArguments],
) -> Run:
    """Submit a recipe, or a reviewed bundle, and return its run at once.

    The arguments are the options of `trnslurm submit`; docs/python.md has them. The run continues
    without this process, also on the local cluster. For a chain, the first run is returned.
    """
    console = PythonConsole(detach=True)
    counts, chained = wholes("elastic", elastic), flag("chain", chain)
    if (recipe is None) == (rendered is None):
        raise ConfigError("submit: give either a recipe or rendered=DIR")
    options = options_of(recipe or "", nodes, job)
    field_of = {"workers": "workers_per_node"}
    asked = {k: getattr(options, field_of.get(k, k)) for k in job if k != "path"}
    asked |= {"elastic": counts, "chain": chained, "nodes": options.nodes}
    if rendered is not None:
        if given := [k for k, v in asked.items() if v and (k, v) != ("nodes", 1)]:
            raise ConfigError(f"rendered: its files are submitted unchanged: leave out {given[0]}")
        first = file_name("rendered", rendered)
        submission = propose_bundle(Path(first), options.host, console)
    else:
        first = options.recipe
        if chained and counts:
            raise ConfigError("elastic does not work with chain: leave out one of them")
        if chained:
            submission = propose_presets(options, console)
        else:
            submission = propose(options, console, elastic=counts)
    words = [f"{k}={v!r}" for k, v in asked.items() if v]
    command = ["python", f"trnslurm.submit({', '.join([repr(first), *words])})"]
    runs, _ = start(submission, command, console)
    return Run._of(runs[0], console.other_remarks)
