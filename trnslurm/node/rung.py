"""Assigns a run to a rung's task when the task starts: the j-th best run of the previous rung.

    python -m trnslurm.node.rung RUNS/SWEEP/rung-2 TASK JOB

It prints the run's name, or nothing if there is no run for the task. Messages go to the log. The
first task to start ranks the runs, and the others read its ranking. A task that is requeued finds
its link and uses the same run again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from trnslurm.contract.attempt import TRAIN
from trnslurm.contract.files import read_json, read_json_lines, write_json, write_json_once
from trnslurm.contract.halving import (
    Halving,
    Ranking,
    place_in,
    rank,
    ranking_file,
    read_halving,
    read_place,
    read_ranking,
)
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.states import State
from trnslurm.contract.times import utc_time
from trnslurm.node.processes import say


def main(argv: list[str]) -> int:
    """Take a run for this task."""
    place, task, job = Path(argv[0]), int(argv[1]), argv[2]
    if name := take(place, task, job):
        print(name)
    return 0


def take(place: Path, task: int, job: str) -> str:
    """Take a task's run and return its name, or an empty string if there is none."""
    sweep, number = place.parent, int(re.sub(r"\D", "", place.name))
    halving = read_halving(sweep)
    if halving is None:
        raise SystemExit(f"error: {sweep} does not define its rungs")
    link = place / str(task)
    if link.is_symlink():
        run = RunFiles(link.resolve())
    else:
        ranking = _ranking(sweep, halving, number - 1)
        _tell(ranking, halving, number)
        if task > len(ranking.order):
            say(f"task {task} of rung {number} has nothing to do: no run is left for it")
            return ""
        run = RunFiles(sweep.parent / ranking.order[task - 1][0])
    if why := _why_not(run, number, taken=link.is_symlink()):
        say(f"task {task} of rung {number} has nothing to do: {run.path.name} {why}")
        return ""
    if not link.is_symlink():
        link.symlink_to(f"../../{run.path.name}")
    _move(run, halving, number, job)
    return run.path.name


def _ranking(sweep: Path, halving: Halving, rung: int) -> Ranking:
    """Return a rung's ranking: the one by the first task that wrote a ranking."""
    found = read_ranking(sweep, rung)
    if found is None:
        runs = [RunFiles(sweep.parent / name) for name in halving.runs]
        here = [run for run in runs if (at := read_place(run)) and at.rung == rung]
        gone = {run.path.name: "it was cancelled" for run in here if run.cancelled_file.exists()}
        told = {r.path.name: _lines(r) for r in here if r.path.name not in gone}
        stop_at = halving.rungs[rung - 1].stop_at
        made = rank(told, stop_at=stop_at, metric=halving.metric, highest=halving.highest)
        facts = {"metric": made.metric, "order": made.order, "out": {**made.out, **gone}}
        write_json_once(ranking_file(sweep, rung), facts)
        found = read_ranking(sweep, rung)
    assert found is not None, f"{ranking_file(sweep, rung)} is damaged"
    return found


def _lines(run: RunFiles) -> list[dict[str, object]]:
    try:
        return read_json_lines(run.metrics_file)
    except OSError:
        return []


def _tell(ranking: Ranking, halving: Halving, number: int) -> None:
    go_on = halving.rungs[number - 1].runs
    for place, (run, score) in enumerate(ranking.order, 1):
        goes = "" if place <= go_on else ", stops"
        say(f"rung {number - 1}, rank {place}: {run}, {ranking.metric} {score:g}{goes}")
    for run, why in ranking.out.items():
        say(f"rung {number - 1}, no rank: {run}: {why}")


def _why_not(run: RunFiles, number: int, *, taken: bool) -> str:
    """Return why a run cannot be taken, or an empty string if it can."""
    at = read_place(run)
    if not run.record_file.is_file():
        return "was removed"
    if at is None or at.rung not in (number - 1, number):
        return "was resumed without the others"
    return "was cancelled" if run.cancelled_file.exists() and not taken else ""


def _move(run: RunFiles, halving: Halving, number: int, job: str) -> None:
    """Record in a run's files that it continues in this rung, as a task of this job.

    The record comes first. A reader with an older record then sees the move, and not a run that has
    ended in its last rung.
    """
    record = read_json(run.record_file)
    if record.get("jobs", {}).get(TRAIN) != job:  # otherwise the task was requeued
        write_json(run.record_file, _moved(run, record, halving, number, job))
    write_json(run.rung_file, place_in(halving.rungs, number))


def _moved(
    run: RunFiles, record: dict[str, Any], halving: Halving, number: int, job: str
) -> dict[str, Any]:
    """Return the record of a run that continues as a task of this job."""
    jobs = record.get("jobs", {})
    before = {
        "nodes": record["nodes"],
        "jobs": jobs,
        "state": State.COMPLETED,
        "reason": f"rung {number - 1} of {len(halving.rungs)}",
        "resumed": utc_time(),
    }
    return record | {
        "jobs": {**jobs, TRAIN: job},
        "depends": "",
        "behind": "",
        "earlier": {**record.get("earlier", {}), TRAIN: max(run.attempt_numbers(TRAIN), default=0)},
        "history": [*record.get("history", []), before],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
