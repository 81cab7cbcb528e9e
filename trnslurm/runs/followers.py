"""The jobs that follow a run, one for each of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import RECORD
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir
from trnslurm.runs.tables import count

_MOST_SHOWN = 4


class Best(Frozen):
    """The checkpoint with the best score by now."""

    step: int
    score: float
    checkpoint: str
    """Its path."""


class Follower(Frozen):
    """A job that starts for each checkpoint of a run."""

    name: str
    group: str
    """The name that all its runs share."""
    runs: int
    step: int | None
    """The newest step that has metrics."""
    numbers: Mapping[str, float]
    """The latest metrics reported by the run for this step."""
    metric: str
    """The metric that selects the best checkpoint, or empty if no checkpoint is kept."""
    best: Best | None
    problem: str
    """Why Slurm rejects the next job, or empty if it does not."""

    @property
    def words(self) -> str:
        """The line about it in `status`."""
        started = f"{count(self.runs, 'job')} so far"
        if self.runs:
            started += f": trnslurm status {self.group}"
        if self.numbers:
            shown = islice(self.numbers.items(), _MOST_SHOWN)
            started += f"; step {self.step}: " + ", ".join(f"{n} {v:.4g}" for n, v in shown)
        if self.best:
            started += f"; best: step {self.best.step}, {self.best.score:.4g}, kept as "
            started += self.best.checkpoint
        elif self.metric and self.numbers and self.metric not in self.numbers:
            started += f"; no job has reported {self.metric}"
        refused = f"; Slurm rejects the next one: {self.problem}" if self.problem else ""
        return f"{self.name} runs for each checkpoint, {started}{refused}"


def followers_of(run: RunDir) -> list[Follower]:
    """Return the followers of a run."""
    if not run.follow.is_dir():
        return []
    places = (place for place in sorted(run.follow.iterdir()) if (place / RECORD).is_file())
    known = run.of_followers()
    return [_follower(run, place, known) for place in places if not place.name.startswith(".")]


def _follower(run: RunDir, place: Path, known: Mapping[int, Mapping[str, float]]) -> Follower:
    marks, prefix = run.mark_files(place.name), f"{place.name}/"
    own = {
        step: {name.removeprefix(prefix): value for name, value in numbers.items()}
        for step, every in known.items()
        if (numbers := {n: v for n, v in every.items() if n.startswith(prefix)})
    }
    step, rule = max(own, default=None), read_json(run.rule_file(place.name))
    return Follower(
        name=place.name,
        group=f"{run.name}.{place.name}",
        runs=len(marks),
        step=step,
        numbers=own[step] if step is not None else {},
        metric=str(rule.get("metric", "")),
        best=_best(run, place.name, sign=-1 if rule.get("highest") else 1),
        problem=str(read_json(run.problem_file(place.name)).get("why", "")),
    )


def _best(run: RunDir, name: str, sign: int) -> Best | None:
    marks = {step: read_json(file) for step, file in run.mark_files(name).items()}
    scored = {step: mark for step, mark in marks.items() if mark.get("score") is not None}
    if not scored:
        return None
    step = min(scored, key=lambda step: sign * scored[step]["score"])
    kept = run.best_checkpoints(name) / scored[step]["checkpoint"]
    return Best(step=step, score=scored[step]["score"], checkpoint=str(kept))
