"""Finds the newest checkpoint that a custom script saved without reporting it."""

from __future__ import annotations

import time

from trnslurm.contract.checkpoints import found, reported_step, takes_checkpoint
from trnslurm.frozen import Frozen
from trnslurm.records.run import RunDir


class Saved(Frozen):
    """A complete checkpoint that was never reported."""

    name: str
    form: str
    """The library that wrote it."""
    path: str
    step: int | None
    """None if its name does not contain the step."""
    age_s: float
    taken: bool
    """Whether the script's next attempt is given the checkpoint, or looks for it."""


def saved(run: RunDir) -> Saved | None:
    """Return the newest complete checkpoint; None if there is none, or the script reports."""
    if not run.project_file.exists() or reported_step(run) or not (left := found(run)):
        return None
    return Saved(
        name=left.path.name,
        form=left.form,
        path=str(left.path),
        step=left.step,
        age_s=round(max(0.0, time.time() - left.time), 1),
        taken=takes_checkpoint(run),
    )
