"""Successive halving: the rungs of a sweep, and which runs continue to the next rung.

RUNS/SWEEP/halving.json the rungs, and the runs in the order of their numbers
RUNS/SWEEP/rung-2/train.sbatch the array of rung 2: its task 1 continues the best run of rung 1
RUNS/SWEEP/rung-2/ranking.json the ranking of rung 1, written by the first task of rung 2
RUNS/SWEEP/rung-2/1 a link to the run that task 1 continues RUN/state/rung.json the rung of a run,
and the step after which it ends there
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trnslurm.contract.files import read_json
from trnslurm.contract.rundir import HALVING, RANKING, RUNG, RunFiles
from trnslurm.frozen import Frozen

COMPARED_BY = ("eval_loss", "loss")
"""The metrics by which runs are compared by default: the first one that any run reports."""


class Rung(Frozen):
    """A part of a sweep, in which a number of its runs train up to a step."""

    runs: int
    stop_at: int
    """The step after which its runs end; for the last rung, their last step."""
    job: str = ""
    """The array job, from the second rung on; empty if it is not in the queue."""


class Halving(Frozen):
    """The rungs of a sweep."""

    factor: int
    rungs: tuple[Rung, ...]
    runs: tuple[str, ...] = ()
    """The names of the runs, by number."""
    metric: str = ""
    """The metric by which runs are compared; empty for COMPARED_BY."""
    highest: bool = False

    @property
    def steps(self) -> int:
        """The steps of all runs in all rungs."""
        before = (0, *(rung.stop_at for rung in self.rungs))
        parts = zip(self.rungs, before)
        return sum(rung.runs * (rung.stop_at - done) for rung, done in parts)

    @property
    def share(self) -> float:
        """The fraction of the full sweep's steps."""
        return self.steps / (self.rungs[0].runs * self.rungs[-1].stop_at)

    def facts(self) -> dict[str, Any]:
        """Return the contents of halving.json."""
        return asdict(self)


class Place(Frozen):
    """The rung of a run."""

    rung: int
    """The number of the rung, from 1."""
    rungs: int
    stop_at: int

    @property
    def words(self) -> str:
        return f"rung {self.rung} of {self.rungs}"


class Ranking(Frozen):
    """The runs of a rung at its end."""

    metric: str
    order: tuple[tuple[str, float], ...]
    """The runs that can continue, with their scores, best first."""
    out: Mapping[str, str]
    """The other runs of the rung, and why they cannot continue."""

    def rank(self, run: str) -> int:
        """Return the rank of a run, from 1, or 0 if it has none."""
        return next((n for n, (name, _) in enumerate(self.order, 1) if name == run), 0)


def divide(runs: int, steps: int, factor: int, first: int = 0) -> tuple[Rung, ...]:
    """Return the rungs of a sweep; `first` is the step at which the first rung ends, if given.

    Each rung has a fraction of the previous rung's runs, and that many times its steps. One run is
    left at the end, or more if the last step comes first.
    """
    sizes = [runs]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // factor))
    if not first:
        last = len(sizes) - 1
        return tuple(
            Rung(runs=size, stop_at=steps // factor ** (last - n)) for n, size in enumerate(sizes)
        )
    ends = [min(first * factor**n, steps) for n in range(len(sizes))]
    ends[-1] = steps
    short = sum(end < steps for end in ends)
    return tuple(Rung(runs=sizes[n], stop_at=ends[n]) for n in range(short + 1))


def rank(
    told: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    stop_at: int,
    metric: str = "",
    highest: bool = False,
) -> Ranking:
    """Rank the runs of a rung by the lines of their metrics.jsonl; of equal runs the first leads.

    Metrics that a run reports after the rung's last step do not count.
    """
    reached = {run: _until(lines, stop_at) for run, lines in told.items()}
    names = [metric] if metric else COMPARED_BY
    there = (n for n in names if any(n in line for lines in reached.values() for line in lines))
    chosen = next(there, names[-1])
    order: list[tuple[float, int, str]] = []
    out: dict[str, str] = {}
    for number, (run, lines) in enumerate(reached.items()):
        values = [line[chosen] for line in lines if chosen in line]
        if not lines:
            out[run] = f"it did not reach step {stop_at}"
        elif not values:
            out[run] = f"it reports no {chosen}"
        elif not _is_finite(values[-1]):
            out[run] = f"its {chosen} is not a finite number"
        else:
            order.append((-values[-1] if highest else values[-1], number, run))
    sign = -1 if highest else 1
    return Ranking(
        metric=chosen,
        order=tuple((run, float(sign * score)) for score, _, run in sorted(order)),
        out=out,
    )


def _until(lines: Sequence[Mapping[str, Any]], stop_at: int) -> list[Mapping[str, Any]]:
    """Return a run's lines up to a step, by attempt and step; empty if the step is not reached."""
    steps = [line for line in lines if _is_step(line)]
    ends = any(line["step"] >= min(stop_at, line.get("steps") or stop_at) for line in steps)
    found = [line for line in steps if line["step"] <= stop_at] if ends else []
    # A repeated step has the same numbers. An attempt that Slurm killed may have written fewer.
    return sorted(found, key=lambda line: (line["step"], line["attempt"]))


def _is_step(line: Mapping[str, Any]) -> bool:
    numbers = (line.get("step"), line.get("attempt"), line.get("steps") or 0)
    return all(isinstance(number, int) for number in numbers)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def read_halving(sweep: Path) -> Halving | None:
    """Return the rungs of a sweep by its directory, or None if they are missing or damaged."""
    return halving_of(read_json(sweep / HALVING))


def halving_of(told: Mapping[str, Any]) -> Halving | None:
    """Return the rungs that halving.json describes."""
    try:
        return Halving(
            factor=int(told["factor"]),
            rungs=tuple(
                Rung(runs=int(r["runs"]), stop_at=int(r["stop_at"]), job=str(r["job"]))
                for r in told["rungs"]
            ),
            runs=tuple(map(str, told["runs"])),
            metric=str(told["metric"]),
            highest=bool(told["highest"]),
        )
    except (KeyError, ValueError, TypeError):
        return None


def ranking_file(sweep: Path, rung: int) -> Path:
    """Return the ranking of a rung, in the directory of the next rung, which needs it."""
    return rung_place(sweep, rung + 1) / RANKING


def rung_place(sweep: Path, rung: int) -> Path:
    """Return the directory of a rung's array."""
    return sweep / RUNG.format(rung)


def read_ranking(sweep: Path, rung: int) -> Ranking | None:
    """Return the ranking of a rung, or None while no task of the next rung has started."""
    told = read_json(ranking_file(sweep, rung))
    try:
        return Ranking(
            metric=str(told["metric"]),
            order=tuple((str(run), float(score)) for run, score in told["order"]),
            out={str(run): str(why) for run, why in told["out"].items()},
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def read_place(run: RunFiles) -> Place | None:
    """Return the rung of a run, or None without one or if it was resumed without the others."""
    told = read_json(run.rung_file)
    try:
        return Place(rung=int(told["rung"]), rungs=int(told["rungs"]), stop_at=int(told["stop_at"]))
    except (KeyError, ValueError, TypeError):
        return None


def rung_end(run_dir: str) -> int:
    """Return the step after which a rung ends a run, or 0 if none does."""
    at = read_place(RunFiles(Path(run_dir))) if run_dir else None
    return at.stop_at if at and at.rung < at.rungs else 0


def place_in(rungs: Sequence[Rung], rung: int) -> dict[str, int]:
    """Return the contents of rung.json."""
    return {"rung": rung, "rungs": len(rungs), "stop_at": rungs[rung - 1].stop_at}
