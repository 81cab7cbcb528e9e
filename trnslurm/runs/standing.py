"""Compares the runs of a sweep."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from trnslurm.contract.files import read_json
from trnslurm.contract.halving import COMPARED_BY, Halving
from trnslurm.contract.states import State
from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir, latest_values
from trnslurm.runs.explain import explained
from trnslurm.runs.halving import RungOf, Rungs, sweep_of
from trnslurm.runs.status import RunStatus, statuses_of


class Standing(Frozen):
    """The runs of a sweep, compared."""

    statuses: Sequence[RunStatus]
    metric: str
    """The metric by which the runs are compared."""
    scores: Sequence[float | None]
    """Each run's latest value of the metric, or None if it is not finite."""
    best: RunStatus | None
    """The run with the lowest score, or the highest if that was chosen.

    If the runs have rungs, only the runs that have come furthest are compared.
    """
    halving: Halving | None = None
    """The rungs of the sweep."""
    rungs: Sequence[RungOf | None] = ()
    """Each run's rung, or None if it has none."""

    @property
    def group(self) -> str:
        """The name of the sweep."""
        return self.statuses[0].group

    @property
    def states(self) -> dict[str, int]:
        """Return the number of runs in each state."""
        return dict(collections.Counter(status.state for status in self.statuses))

    @property
    def final(self) -> bool:
        """Check whether all runs have ended."""
        return all(status.final for status in self.statuses)

    @property
    def mend(self) -> str:
        """The command that resumes runs that stopped early, or empty if there are none."""
        each = zip(self.statuses, self.rungs, strict=True)
        left = [s for s, rung in each if not (rung and rung.over)]
        again = f"trnslurm resume {self.group}"
        stopped = [s for s in left if s.mend in (f"trnslurm resume {s.run}", again)]
        if len(stopped) == 1 and not self.halving:
            return stopped[0].mend
        return again if stopped else ""

    @property
    def to_correct(self) -> dict[str, list[str]]:
        """Return each fix that requires a new submission, and the runs that failed without it."""
        found: dict[str, list[str]] = {}
        for status in self.statuses:
            if status.fix and status.mend != f"trnslurm resume {status.run}":
                found.setdefault(status.next, []).append(status.run)
        return found


def standing_of(
    runs: Sequence[RunDir], *, lowest: str | None = None, highest: str | None = None
) -> Standing:
    """Compare runs by the latest value of a metric. The best run has the lowest or highest value.

    The default metric is that of a sweep's --halving, or of the rule of jobs for each checkpoint.
    Otherwise it is the held-out loss, or the training loss if nothing is held out.
    """
    if lowest and highest:
        raise RunError(
            "the best run has the lowest or the highest value of one metric: pass only one"
        )
    statuses, broken = statuses_of(runs)
    if broken:
        raise broken[0]
    statuses = [
        explained(run, status)[0] if status.state is State.FAILED else status
        for run, status in zip(runs, statuses, strict=True)
    ]
    found = [latest_values(run.steps()) for run in runs]
    rungs, first = Rungs(), runs[0].record()
    halving = rungs.halving(sweep_of(runs[0], first)) if first.group else None
    if halving and halving.metric and not (lowest or highest):
        lowest, highest = halving.metric, halving.metric if halving.highest else None
    rule = _rule_of(runs[0], first.group or "")
    if any(rule.get("metric") in s for s in found) and not (lowest or highest):
        lowest, highest = rule["metric"], rule["metric"] if rule.get("highest") else None
    chosen = highest or lowest
    names = [chosen] if chosen else COMPARED_BY
    metric = next((name for name in names if any(name in s for s in found)), names[-1])
    if chosen and not any(metric in s for s in found) and any(found):
        known = ", ".join(sorted({name for s in found for name in s}))
        raise RunError(f"none of the runs report {metric}, only {known}")
    scores = [s.get(metric) for s in found]
    sign = -1 if highest else 1
    at = [rungs.rung_of(run, run.record()) if halving else None for run in runs]
    # A run without a rung was resumed to its last step.
    far = [rung.rung if rung else len(halving.rungs) if halving else 0 for rung in at]
    scored = [(-far[n], sign * score, n) for n, score in enumerate(scores) if score is not None]
    return Standing(
        statuses=statuses,
        metric=metric,
        scores=scores,
        best=statuses[min(scored)[2]] if scored else None,
        halving=halving,
        rungs=at,
    )


def _rule_of(run: RunDir, group: str) -> Mapping[str, Any]:
    """Return the rule of the jobs for a run's checkpoints if this run is one of them."""
    of = run.followed / "of"
    if not of.exists():
        return {}
    followed = RunDir(of.resolve())
    return read_json(followed.rule_file(group.removeprefix(f"{followed.name}.")))
