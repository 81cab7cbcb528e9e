"""submit: a recipe, or a reviewed bundle, becomes a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from trnslurm.api.arguments import (
    PathLike,
    Paths,
    Settings,
    file_name,
    flag,
    one_line_errors,
    options_of,
    take_remark,
    whole,
    wholes,
)
from trnslurm.api.chain import links_of
from trnslurm.api.choice import Say, choose_cluster, config_of
from trnslurm.api.run import Run
from trnslurm.api.search import Options, workspace_of
from trnslurm.cluster.cache import PRECOMPILE, CompileCache
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.runs.result import no_result
from trnslurm.runs.run import RunDir
from trnslurm.submit.here import check_here, check_notify
from trnslurm.submit.job import Job, Link, alone, make_job, read_job
from trnslurm.submit.precompile import Need, jobs_ahead, need_of, needs_of
from trnslurm.submit.submit import submit_ahead, submit_chain


class Proposal(Frozen):
    """What would be submitted: checked as far as this host can, and nothing of it made."""

    links: Sequence[Link]
    """The run, and those of its chain."""
    needs: Sequence[Need]
    """Of each run: whether its graphs must be compiled first."""
    ahead: Sequence[Need]
    """The same for further node counts, on which it may continue."""
    cache: CompileCache
    stamp: str = ""
    """The time in the names of its runs, if that is settled already."""

    @property
    def local(self) -> bool:
        """Check whether it runs on this machine, without Slurm."""
        return self.links[0].job.local

    @property
    def jobs_ahead(self) -> list[Need]:
        """Return the further node counts for which there is something to compile."""
        return [need for need in self.ahead if need.phases]

    @property
    def expected_node_hours(self) -> float:
        """Return what it is expected to take, or what its time limits allow if nothing is known."""
        return sum(
            need.job.estimate.node_hours if need.job.estimate else need.limit_node_hours
            for need in (*self.needs, *self.jobs_ahead)
        )

    def start(
        self, command: Sequence[str], *, detach: bool, say: Say
    ) -> tuple[list[RunDir], list[RunDir]]:
        """Submit it; return its runs, and those that only compile for further node counts.

        `command` is what the user called, for the record.
        """
        runs = submit_chain(
            self.links, command, cache=self.cache, stamp=self.stamp, detach=detach, say=say
        )
        jobs = [need.job for need in self.jobs_ahead]
        return runs, submit_ahead(jobs, command, cache=self.cache, say=say)


def propose(
    recipe: str, nodes: int, options: Options, *, chain: bool, elastic: Sequence[int], say: Say,
    elsewhere: bool = False,
) -> Proposal:  # fmt: skip
    """Return what a recipe on so many nodes would be submitted as, or refuse it.

    `elastic` are further node counts to compile for; with `chain` the presets that follow are
    submitted as well. What is to be submitted `elsewhere` is checked there.
    """
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, say=say)
    if chain:
        links = links_of(workspace, recipe, options, nodes, cluster, preset, say)
        return check_proposal(links, [], say, elsewhere=elsewhere)
    config = config_of(workspace, recipe, options, cluster, preset, say=say)
    if problem := no_result(config):
        raise ConfigError(problem)
    spec = make_spec(config, nodes, name=options["name"])
    if warning := check_memory(spec):
        say(f"warning: {warning}")
    cache = CompileCache(config.cluster)
    if PRECOMPILE in spec.phases and not elsewhere:
        cache.ask_ahead()
    dirs = workspace.template_dirs()
    others = jobs_ahead(config, spec, elastic, dirs) if elastic else []
    links = [alone(make_job(spec, dirs))]
    return check_proposal(links, others, say, cache, elsewhere=elsewhere)


def propose_bundle(directory: Path, say: Say, *, elsewhere: bool = False) -> Proposal:
    """Return what a reviewed bundle would be submitted as, byte for byte."""
    return check_proposal([alone(read_job(directory))], [], say, elsewhere=elsewhere)


def check_jobs(jobs: Sequence[Job], say: Say) -> None:
    """Refuse what this host sees that a job lacks, and say what it may lack."""
    for job in jobs:
        for warning in (*check_here(job), *check_notify(job)):
            say(f"warning: {warning}")


def check_proposal(
    links: Sequence[Link], others: Sequence[Job], say: Say, cache: CompileCache | None = None, *,
    elsewhere: bool = False, stamp: str = "",
) -> Proposal:  # fmt: skip
    """Check what this host can see of the jobs, and which graphs are compiled."""
    if not elsewhere:
        check_jobs([link.job for link in links], say)
    cache = cache or CompileCache(links[0].job.profile)
    asked = None if elsewhere else cache
    if cache.is_asking and not links[0].job.local:
        importlib.import_module("trnslurm.submit.on_slurm")  # it takes as long as the answer
    needs = needs_of(links, asked)
    ahead = [need_of(job, asked) for job in others]
    return Proposal(links=links, needs=needs, ahead=ahead, cache=cache, stamp=stamp)


@one_line_errors
def submit(
    recipe: PathLike | None = None, *, nodes: int = 1, rendered: PathLike | None = None,
    precompile: str | None = None, elastic: int | Sequence[int] = (), chain: bool = False,
    cluster: str | None = None, preset: str | None = None, settings: Settings = (),
    workers: int | None = None, from_run: object = None, time: str | int | None = None,
    name: str | None = None, sbatch: str | Sequence[str] = (), allow_idle: bool = False,
    arguments: Sequence[str] = (), launcher: str | None = None,
    notify: str | Sequence[str] = (), path: Paths = (),
) -> Run:  # fmt: skip
    """Submit a recipe, or a reviewed bundle, and return its run at once.

    The arguments are the options of `trnslurm submit`; docs/python.md has them. The run goes on
    without this process, also on the local cluster. Of a chain it is the first run.
    """
    options = options_of(
        cluster=cluster, preset=preset, settings=settings, workers=workers, from_run=from_run,
        time=time, name=name, sbatch=sbatch, allow_idle=allow_idle, arguments=arguments,
        launcher=launcher, notify=notify, precompile=precompile, path=path,
    )  # fmt: skip
    asked = {k: v for k, v in options.items() if v and k != "path"}
    asked |= {"elastic": wholes("elastic", elastic), "chain": flag("chain", chain)}
    asked |= {"nodes": whole("nodes", nodes)}
    remarks: list[str] = []

    def say(remark: str) -> None:
        take_remark(remark, remarks)

    if (recipe is None) == (rendered is None):
        raise ConfigError("submit: give either a recipe or rendered=DIR")
    if rendered is not None:
        if given := [k for k, v in asked.items() if v and (k, v) != ("nodes", 1)]:
            raise ConfigError(
                f"rendered: its files are submitted as they are: leave out {given[0]}"
            )
        first = file_name("rendered", rendered)
        proposal = propose_bundle(Path(first), say)
    else:
        first = file_name("recipe", recipe)
        if asked["chain"] and asked["elastic"]:
            raise ConfigError("elastic does not work with chain: leave out one of them")
        proposal = propose(
            first, asked["nodes"], options, chain=asked["chain"], elastic=asked["elastic"], say=say
        )
    words = [f"{k}={v!r}" for k, v in asked.items() if v]
    command = ["python", f"trnslurm.submit({', '.join([repr(first), *words])})"]
    runs, _ = proposal.start(command, detach=True, say=say)
    return Run._of(runs[0], remarks)
