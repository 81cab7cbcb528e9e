"""With a safeguard taken out of the code that runs, the check that needs it must fail.

The code is that of a rendered bundle: a line of it is changed, and the bundle submitted.
"""

from __future__ import annotations

import pytest

from ..packaged import change_source
from .test_disk import damage_three, written_durably
from .test_slurm import two_attempts
from .trainings import Training

pytestmark = pytest.mark.faults

CHECKPOINT = "trnslurm/train/checkpoint"


def submit_without(user, safeguard: tuple[str, str, str], *sets: str) -> Training:
    """Submit the small training with a line of its code replaced."""
    file, line, replacement = safeguard
    bundle = user.home / "bundle"
    options = user.options(2, "device=cpu", *sets)
    user.trnslurm("render", "endurance", *options, "-o", str(bundle))

    def take_out(text: str) -> str:
        assert text.count(line) == 1, f"{file} has another line now"
        return text.replace(line, replacement)

    change_source(bundle, f"{CHECKPOINT}/{file}", take_out)
    run = user.submit_rendered(bundle)
    return Training(run.user, run.path, run.jobs)


def test_without_the_fence(user) -> None:
    """The older attempt goes on committing."""
    fence = ("directory.py", "return newest if newest > attempt else None", "return None")
    run = submit_without(user, fence, "train.pause_s=0.3", "train.keep_last=50")
    with pytest.raises(AssertionError, match="committed by an attempt that is over"):
        two_attempts(run)


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("    os.fsync(file.fileno())", "is not on the disk"),
        ("        os.fsync(descriptor)", "names in"),
    ],
)
def test_without_an_fsync(user, line: str, missing: str) -> None:
    """Of files, or of directories."""
    without = line.replace("os.fsync", "str")
    safeguard = ("directory.py", line, without)
    run = submit_without(user, safeguard, "train.note_disk=true", "train.pause_s=0")
    run.until("COMPLETED")
    with pytest.raises(AssertionError, match=missing):
        written_durably(run)


def test_without_the_check_of_the_manifest(user) -> None:
    """The checkpoint with a flipped bit is taken for a good one."""
    check = ("manifest.py", 'if sha256 != file["sha256"]:', "if not sha256:")
    run = submit_without(user, check, "train.keep_last=6")
    with pytest.raises(AssertionError, match="a damaged one"):
        damage_three(run)
