"""Asks the workers of a running job to record their next steps, and reads the recordings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.states import State
from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import cleaned, printable, refuse_foreign
from trnslurm.records.run import RunDir, is_number
from trnslurm.runs.status import run_status

_POLL_S = 1.0
_LOOK_S = 15.0


class Recorded(Frozen):
    """The steps that a worker has recorded."""

    rank: int
    host: str
    problem: str
    """Why there is no trace, or empty if there is one."""
    steps: int
    seconds: float
    shares: dict[str, float]
    """The share of the time spent on each kind of work, the largest first."""
    trace: str | None
    """A file for https://ui.perfetto.dev."""
    memory: str | None
    """The snapshot of its memory, for https://pytorch.org/memory_viz."""


def ask(run: RunDir, *, steps: int, workers: Sequence[int], memory: bool = False) -> str:
    """Ask for a recording and return its name."""
    refuse_foreign(run.path, "ask the workers of")
    status = run_status(run)
    if status.state is not State.RUNNING or status.phases[-1].phase != "train":
        raise RunError(
            f"{run.name} is {status.state}: `profile` requires a running job that is training"
        )
    number = read_json(run.plan_file).get("workers")
    if isinstance(number, int) and max(workers) >= number:
        raise RunError(f"{run.name} has no worker {max(workers)}, only workers 0 to {number - 1}")
    name = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    request = {"id": name, "steps": steps, "workers": list(workers), "memory": memory}
    write_json(run.profile_request, request)
    return name


def recorded(run: RunDir, name: str, workers: Sequence[int]) -> Iterator[Recorded]:
    """Yield each worker's recording as soon as it is available. End early if the job ends."""
    left = list(workers)
    look_at = time.monotonic() + _LOOK_S
    while left:
        for rank in list(left):
            if facts := read_json(run.profile_file(name, rank, "summary.json")):
                left.remove(rank)
                yield _recorded(run, name, rank, cleaned(facts))
        if left and time.monotonic() > look_at:
            look_at = time.monotonic() + _LOOK_S
            if (status := run_status(run)).final:
                raise RunError(
                    f"{run.name} is {status.state}: its workers did not record anything more"
                )
        if left:
            time.sleep(_POLL_S)


def all_recorded(run: RunDir) -> list[Recorded]:
    """Return the traces that a run's workers have recorded, on request or because of its recipe."""
    return [
        _recorded(run, name, rank, cleaned(read_json(run.profile_file(name, rank, "summary.json"))))
        for name, rank in run.profiles()
    ]


def _recorded(run: RunDir, name: str, rank: int, facts: dict[str, Any]) -> Recorded:
    shares, steps, seconds = (facts.get(key) for key in ("shares", "steps", "seconds"))
    trace, memory = (run.profile_file(name, rank, kind) for kind in ("json.gz", "memory.pickle"))
    return Recorded(
        rank=rank,
        host=printable(str(facts.get("host", "?"))),
        problem=printable(str(facts.get("problem", ""))),
        steps=steps if isinstance(steps, int) else 0,
        seconds=float(seconds) if is_number(seconds) and seconds else 0.0,
        shares={
            printable(kind): float(share)
            for kind, share in (shares.items() if isinstance(shares, dict) else ())
            if is_number(share)
        },
        trace=str(trace) if trace.exists() else None,
        memory=str(memory) if memory.exists() else None,
    )
