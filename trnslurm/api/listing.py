"""Choose the runs to list: the newest, the runs of a sweep, or a selection of all runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from trnslurm.api.search import run_roots
from trnslurm.config.search import Workspace
from trnslurm.errors import RunError
from trnslurm.runs.find import find_runs, list_runs
from trnslurm.runs.run import RunDir, latest_values
from trnslurm.runs.status import RunStatus, statuses_of

_NEWEST = 20


def list_statuses(
    workspace: Workspace,
    sweep: str | None = None,
    *,
    everything: bool = False,
    states: Collection[str] = (),
    recipe: str | None = None,
    since: str = "",
    sort: str | None = None,
    limit: int | None = None,
) -> tuple[list[RunStatus], list[RunError]]:
    """Return the statuses of runs, newest last, and the errors of damaged runs.

    Without a selection these are the newest 20 runs. `since` has the format of times in records;
    `sort` orders the runs by a metric, lowest first.
    """
    roots = run_roots(workspace)
    found = find_runs(sweep, roots) if sweep is not None else list_runs(roots)
    if sweep is None and not (everything or states or recipe or since or sort or limit):
        found = found[-_NEWEST:]
    statuses, broken = statuses_of(found)
    statuses = [
        status
        for status in statuses
        if (not states or status.state in states)
        and (recipe is None or status.recipe == recipe)
        and status.created >= since
    ]
    if sort is not None:
        return _sorted_by(sort, statuses)[:limit], broken
    return statuses[-limit:] if limit else statuses, broken


def latest_metrics(status: RunStatus) -> dict[str, float]:
    """Return the latest value of each metric."""
    return latest_values(RunDir(Path(status.path)).steps())


def _sorted_by(metric: str, statuses: Sequence[RunStatus]) -> list[RunStatus]:
    """Return runs ordered by a metric; runs without the metric come last."""
    said = [(latest_metrics(status), status) for status in statuses]
    known = sorted({name for numbers, _ in said for name in numbers})
    if known and metric not in known:
        raise RunError(f"no run reports {metric}; the runs report {', '.join(known)}")
    return [s for _, s in sorted(said, key=lambda each: each[0].get(metric, math.inf))]
