"""sweep: runs of one recipe that differ in some values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.api.arguments import (
    PathLike,
    Paths,
    Settings,
    file_name,
    one_line_errors,
    options_of,
    take_remark,
    whole,
    words_of,
)
from trnslurm.api.choice import Say, choose_cluster, config_of
from trnslurm.api.run import Run, Runs
from trnslurm.api.search import Options, workspace_of
from trnslurm.api.submit import Proposal, check_jobs
from trnslurm.api.tables import said_of
from trnslurm.cluster.cache import CompileCache
from trnslurm.config.sweep import MOST_RUNS, Point, points_of
from trnslurm.errors import ConfigError
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.runs.result import no_result
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import statuses_of
from trnslurm.submit.job import Job, alone, make_job
from trnslurm.submit.precompile import needs_of_sweep
from trnslurm.submit.submit import submit_sweep

_MOST_HERE = 50  # each waits in processes of its own
_SHARED = ("run_root", "compile_cache", "scheduler")


class SweepProposal(Proposal):
    """What a sweep would be submitted as: its links are its runs, which nothing connects."""

    name: str
    points: Sequence[Point]
    at_most: int | None
    """How many run at a time; None: as many as the cluster has room for."""

    def start(
        self, command: Sequence[str], *, detach: bool, say: Say
    ) -> tuple[list[RunDir], list[RunDir]]:
        """Submit all of it, or nothing; return its runs."""
        jobs = [link.job for link in self.links]
        runs = submit_sweep(
            jobs, self.points, command, name=self.name, at_most=self.at_most, cache=self.cache,
            detach=detach, say=say,
        )  # fmt: skip
        return runs, []


def propose_sweep(
    recipe: str, nodes: int, options: Options, points: Sequence[Point], *, at_most: int | None,
    say: Say, elsewhere: bool = False,
) -> SweepProposal:  # fmt: skip
    """Return what a sweep would be submitted as, or refuse it: every run of it is checked.

    What is to be submitted `elsewhere` is checked there.
    """
    _refuse_set_twice(options, points)
    workspace = workspace_of(options)
    cluster, preset = choose_cluster(workspace, recipe, options, say=say)
    said: set[str] = set()

    def say_once(remark: str) -> None:
        if remark not in said:
            said.add(remark)
            say(remark)

    jobs: list[Job] = []
    name = ""
    for number, point in enumerate(points, 1):
        words = [f"{key}={value}" for key, value in point.items()]
        own = {**options, "settings": [*options["settings"], *words]}
        config = config_of(workspace, recipe, own, cluster, preset, say=say_once)
        if problem := no_result(config):
            raise ConfigError(problem)
        name = options["name"] or config.recipe_name
        spec = make_spec(config, nodes, name=f"{name}-{number}")
        if warning := check_memory(spec):
            say_once(f"warning: {warning}")
        code = jobs[0].bundle.files if jobs else {}
        code = {file: data for file, data in code.items() if file.startswith("code/")}
        jobs.append(make_job(spec, workspace.template_dirs(), code=code))
    _refuse_unlike(jobs, points)
    local = jobs[0].local
    if local and (at_most or 1) > 1:
        raise ConfigError(
            f"--at-most {at_most}: on this machine the runs of a sweep follow one another"
        )
    if local and len(jobs) > _MOST_HERE:
        raise ConfigError(f"the sweep has {len(jobs)} runs: at most {_MOST_HERE} on this machine")
    if not elsewhere:
        check_jobs(jobs, say_once)
    cache = CompileCache(jobs[0].profile)
    return SweepProposal(
        links=[alone(job) for job in jobs], ahead=[],
        needs=needs_of_sweep(jobs, None if elsewhere else cache),
        cache=cache, name=name, points=points, at_most=1 if local else at_most,
    )  # fmt: skip


@one_line_errors
def sweep(
    recipe: PathLike, values: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]], *,
    nodes: int = 1, at_most: int | None = None, precompile: str | None = None,
    cluster: str | None = None, preset: str | None = None, settings: Settings = (),
    workers: int | None = None, from_run: object = None, time: str | int | None = None,
    name: str | None = None, sbatch: str | Sequence[str] = (), allow_idle: bool = False,
    arguments: Sequence[str] = (), launcher: str | None = None,
    notify: str | Sequence[str] = (), path: Paths = (),
) -> Runs:  # fmt: skip
    """Submit a run for each combination of values, or for each mapping in a list; return all.

    The other arguments are those of `submit`, for every run.
    """
    options = options_of(
        cluster=cluster, preset=preset, settings=settings, workers=workers, from_run=from_run,
        time=time, name=name, sbatch=sbatch, allow_idle=allow_idle, arguments=arguments,
        launcher=launcher, notify=notify, precompile=precompile, path=path,
    )  # fmt: skip
    points = points_of([], _rows(values))
    remarks: list[str] = []

    def say(remark: str) -> None:
        take_remark(remark, remarks)

    proposal = propose_sweep(
        file_name("recipe", recipe), whole("nodes", nodes), options, points,
        at_most=None if at_most is None else whole("at_most", at_most), say=say,
    )  # fmt: skip
    command = ["python", f"trnslurm.sweep({recipe!r}, {values!r}, nodes={nodes!r})"]
    runs, _ = proposal.start(command, detach=True, say=say)
    statuses, _ = statuses_of(runs)
    return Runs(statuses, [Run._of(run, remarks, path) for run in runs])


def _rows(values: object) -> list[Point]:
    """Return the points of a call: Python's values as --set takes them."""
    if isinstance(values, Mapping):
        rows: list[dict[str, str]] = [{}]
        for key, each in values.items():
            if isinstance(each, str | Mapping) or not hasattr(each, "__iter__"):
                raise ConfigError(f"values: {key}={each!r}: expected a list of values")
            settings = [words_of({key: value})[0].partition("=")[2] for value in each]
            rows = [{**row, key: setting} for row in rows for setting in settings][: MOST_RUNS + 1]
        if values and rows:
            return [*rows]
    elif isinstance(values, Sequence) and values and all(isinstance(v, Mapping) for v in values):
        pairs = [[word.partition("=") for word in words_of(row)] for row in values]
        if all(pairs):
            return [{key: value for key, _, value in row} for row in pairs]
    raise ConfigError(
        f"values={values!r}: expected {{KEY: [VALUE, VALUE]}}, which are combined, or a list of "
        "{KEY: VALUE}, a run each"
    )


def _refuse_set_twice(options: Options, points: Sequence[Point]) -> None:
    keys = {key for point in points for key in point}
    for key in (word.partition("=")[0] for word in options["settings"]):
        if key in keys:
            raise ConfigError(
                f"--sweep {key} and --set {key}=… contradict each other: leave out one of them"
            )


def _refuse_unlike(jobs: Sequence[Job], points: Sequence[Point]) -> None:
    """Refuse runs that would not be of one place."""
    for job, point in zip(jobs, points, strict=True):
        for key in _SHARED:
            if getattr(job.profile, key) != getattr(jobs[0].profile, key):
                raise ConfigError(f"{said_of(point)}: all runs of a sweep have one {key}")
