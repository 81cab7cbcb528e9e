"""Reports how far the copies of a run's checkpoints in S3 have come, and what delays them."""

from __future__ import annotations

from trnslurm.contract.checkpoints import newest_step
from trnslurm.contract.files import read_json
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import read_fields
from trnslurm.records.run import RunDir


class Mirrored(Frozen):
    """The progress of copying a run's checkpoints."""

    place: str
    newest: int
    """The newest step on disk."""
    step: int = 0
    """The newest step that has been copied to S3, or 0 if there is none."""
    why: str = ""
    """Why there is no newer copy, if there should be one."""
    since: str = ""
    """The start of the problem, or the time when data of `sending` last arrived."""
    sending: int = 0
    """The step that is currently being copied."""
    sent: int = 0
    """The number of bytes copied so far."""
    bytes: int = 0

    def __str__(self) -> str:
        if not self.step and not self.newest:
            return f"nothing yet in {self.place}" + (f": {self.why}" if self.why else "")
        where = f"step {self.step} is in {self.place}" if self.step else f"nothing in {self.place}"
        if self.step >= self.newest:
            return (
                f"{where}; nothing has been copied since {self.since}: {self.why}"
                if self.why
                else where
            )
        if self.why:
            return f"{where}; step {self.newest} has not been copied since {self.since}: {self.why}"
        if self.sending:
            done = f"{self.sent / 1e6:,.0f} of {self.bytes / 1e6:,.0f} MB"
            return f"{where}; {done} of step {self.sending} copied at {self.since}"
        return f"{where}; step {self.newest} is not copied yet"


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
