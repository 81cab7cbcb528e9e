"""Where recipes, profiles and runs are searched for, and which runs are listed."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

from trnslurm.config.search import RUN_ROOT, Workspace, read_yaml
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir, latest_values
from trnslurm.runs.find import find_runs, known_roots, list_runs
from trnslurm.runs.status import RunStatus, statuses_of
from trnslurm.sandbox.layout import search_roots

_NEWEST = 20


def workspace_of(path: Sequence[str] = ()) -> Workspace:
    """Return the search path, with the directories of --path first."""
    return Workspace.discover(path, more=search_roots())


def run_roots(workspace: Workspace) -> list[Path]:
    """Return the run roots: those used before, and those in known profiles."""
    roots = known_roots()
    for file in workspace.clusters().values():
        try:
            root = read_yaml(file).get("run_root", RUN_ROOT)
            roots.append(Path(str(root)).expanduser())
        except (TrnslurmError, RuntimeError):  # ~name of an unknown user
            continue
    # Unlike Path.is_dir, it is False for a text that cannot be a path.
    return [r for r in dict.fromkeys(roots) if os.path.isdir(r)]  # noqa: PTH112


class RunFilter(Frozen):
    """Which runs to list: by default the newest 20 that do not follow another run."""

    sweep: str | None = None
    everything: bool = False
    states: Collection[str] = ()
    recipe: str | None = None
    since: str = ""
    """The earliest submission time, in the records' format."""
    sort: str | None = None
    """The metric by which to sort the runs, lowest first."""
    limit: int | None = None

    @property
    def selects(self) -> bool:
        """Check whether the filter may omit runs that are recent enough."""
        return bool(self.states or self.recipe or self.since or self.sort)


def list_statuses(
    workspace: Workspace, chosen: RunFilter
) -> tuple[list[RunStatus], list[RunError]]:
    """Return the statuses of the chosen runs, newest last, and the errors of damaged runs."""
    roots, limit = run_roots(workspace), chosen.limit
    found = list_runs(roots) if chosen.sweep is None else find_runs(chosen.sweep, roots)
    if chosen == RunFilter():
        own = (run for run in reversed(found) if not run.followed.is_dir())
        found = [*islice(own, _NEWEST)][::-1]
    statuses, broken = statuses_of(found)
    statuses = [
        status
        for status in statuses
        if (not chosen.states or status.state in chosen.states)
        and chosen.recipe in (None, status.recipe)
        and status.created >= chosen.since
    ]
    if chosen.sort is not None:
        return _sorted_by(chosen.sort, statuses)[:limit], broken
    return statuses[-limit:] if limit else statuses, broken


def latest_metrics(status: RunStatus) -> dict[str, float]:
    """Return the latest value of each metric."""
    return latest_values(RunDir(Path(status.path)).steps())


def _sorted_by(metric: str, statuses: Sequence[RunStatus]) -> list[RunStatus]:
    """Return runs sorted by a metric, with runs that lack the metric last."""
    latest = [(latest_metrics(status), status) for status in statuses]
    known = sorted({name for numbers, _ in latest for name in numbers})
    if known and metric not in known:
        raise RunError(f"none of the runs report {metric}, only {', '.join(known)}")
    return [s for _, s in sorted(latest, key=lambda each: each[0].get(metric, math.inf))]
