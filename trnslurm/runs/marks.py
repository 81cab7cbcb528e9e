"""The marks that a user puts on a run: protection and a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trnslurm.records.foreign import refuse_foreign
from trnslurm.records.run import RunDir
from trnslurm.runs.by_hand import refuse_by_hand


def keep(runs: Sequence[RunDir], *, kept: bool) -> None:
    """Protect all of the runs from removal, or end their protection. Either all change or none."""
    for run in runs:
        refuse_foreign(run.path, "keep")
        refuse_by_hand(run, run.record(), "there is no run record to mark")
    for run in runs:
        run.write_record(replace(run.record(), kept=kept))


def write_note(run: RunDir, text: str) -> None:
    """Replace the note about a run, or remove it if the new one is empty."""
    refuse_foreign(run.path, "note")
    refuse_by_hand(run, run.record(), "there is no run record to add a note to")
    run.write_record(replace(run.record(), note=text))
