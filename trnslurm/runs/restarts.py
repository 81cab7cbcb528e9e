"""Finds an attempt of a custom script that started over although there was a checkpoint."""

from __future__ import annotations

from typing import Any

from trnslurm.contract.attempt import TRAIN
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir, is_number
from trnslurm.runs.status import RunStatus

# A script may count its steps from 1 and still continue: then its loss has become smaller.
_SAME_LOSS = 0.9


class Restarted(Frozen):
    """An attempt whose first step is not after its checkpoint."""

    attempt: int
    step: int
    """The attempt's first step."""
    checkpoint: int | None
    """The step of the newest checkpoint when the attempt began, or None if unknown."""

    def __str__(self) -> str:
        known = self.checkpoint is not None
        saved = f"the checkpoint of step {self.checkpoint}" if known else "its checkpoint"
        return (
            f"attempt {self.attempt} started over at step {self.step} instead of after {saved}: "
            "check that the script loads the checkpoint"
        )


def restarted(run: RunDir, status: RunStatus) -> Restarted | None:
    """Return the newest attempt if it is known to have started over, or None."""
    last = status.attempts[-1] if status.attempts else None
    if not last or last.phase != TRAIN or last.attempt < 2 or not run.project_file.exists():
        return None
    if not last.checkpoint and not last.changed:
        return None
    lines = run.lines()
    first: dict[int, dict[str, Any]] = {}
    for line in lines:
        first.setdefault(line["attempt"], line)
    before = [first[number] for number in sorted(first) if number < last.attempt]
    if last.attempt not in first or not before:
        return None
    now = first[last.attempt]
    saved = last.checkpoint or max(
        (
            line["step"]
            for line in lines
            if line["attempt"] < last.attempt and _was_by(line, last.changed)
        ),
        default=-1,
    )
    if now["step"] > min(saved, before[-1]["step"]) or _has_learned(now, before[0]):
        return None
    known = last.checkpoint or None
    return Restarted(attempt=last.attempt, step=now["step"], checkpoint=known)


def _was_by(line: dict[str, Any], time: float) -> bool:
    at = _number(line, "time")
    return at is not None and at <= time


def _has_learned(now: dict[str, Any], before: dict[str, Any]) -> bool:
    loss, was = _number(now, "loss"), _number(before, "loss")
    return loss is not None and was is not None and loss < _SAME_LOSS * was


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return value if is_number(value) else None
