"""Tells how far the copies of a run's checkpoints in S3 are, and why they are not further."""

from __future__ import annotations

from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.files import read_json
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import read_fields
from trnslurm.records.run import RunDir


class Mirrored(Frozen):
    """The copies of a run's checkpoints."""

    place: str
    newest: int
    """The newest step on disk."""
    step: int = 0
    """The newest step of which S3 has a copy; 0: none."""
    why: str = ""
    """Why there is no newer copy, if there should be one."""
    since: str = ""
    """Since when; or when of `sending` something arrived last."""
    sending: int = 0
    """The step that is being copied."""
    sent: int = 0
    """Bytes of it."""
    bytes: int = 0

    def __str__(self) -> str:
        if not self.step and not self.newest:
            return f"nothing yet in {self.place}" + (f": {self.why}" if self.why else "")
        where = f"step {self.step} is in {self.place}" if self.step else f"nothing in {self.place}"
        if self.step >= self.newest:
            return (
                f"{where}; since {self.since} nothing is copied: {self.why}" if self.why else where
            )
        if self.why:
            return f"{where}, step {self.newest} is not, since {self.since}: {self.why}"
        if self.sending:
            done = f"{self.sent / 1e6:,.0f} of {self.bytes / 1e6:,.0f} MB"
            return f"{where}, of step {self.sending} {done} at {self.since}"
        return f"{where}, step {self.newest} is not"


def mirrored(run: RunDir) -> Mirrored | None:
    """Return the progress of a run's mirror, or None if it has none."""
    place = read_json(run.mirror_file).get("place")
    if not isinstance(place, str) or not place:
        return None
    known = {"place": f"{place}/{run.name}", "newest": newest_step(run)}
    try:
        return read_fields(Mirrored, read_json(run.mirrored_file) | known)
    except ValueError:  # damaged
        return read_fields(Mirrored, known)
