"""Removes runs or their checkpoints, unless the run is protected or may still run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from trnslurm.errors import RunError
from trnslurm.frozen import Frozen
from trnslurm.rundir import ARRAY, read_json
from trnslurm.runs.foreign import is_ours, refuse_foreign
from trnslurm.runs.run import RunDir
from trnslurm.runs.status import RunStatus, run_status

_HIDDEN = ".removed-"


class Removable(Frozen):
    """A run that has ended, and what its removal would free."""

    run: RunDir
    status: RunStatus
    bytes: int
    """Disk space that the removal frees."""
    ended: str
    """When the run ended, or else when it was submitted, in the format of records."""


def refuse_needed(status: RunStatus, others: Sequence[RunStatus]) -> None:
    """Refuse to remove a run that is protected, may still run, or is needed by another run."""
    refuse_foreign(Path(status.path), "remove")
    if status.kept:
        raise RunError(f"{status.run} is protected: trnslurm keep --undo {status.run}")
    if not status.final or status.mend == f"trnslurm cancel {status.run}":
        raise RunError(f"{status.run} is {status.state}: trnslurm cancel {status.run}")
    for other in others:
        if not other.final and other.path != status.path and _starts_from(other, status):
            raise RunError(f"{other.run}, which is {other.state}, starts from {status.run}")


def _starts_from(run: RunStatus, other: RunStatus) -> bool:
    """Check whether a run starts from the result of another run."""
    if run.after == other.run:
        return True
    train = read_json(RunDir(Path(run.path)).plan_file).get("train")
    source = train.get("init_from") if isinstance(train, dict) else None
    return isinstance(source, str) and f"{source}/".startswith(f"{other.path}/")


def removable(status: RunStatus, *, checkpoints: bool) -> Removable:
    """Return a run with the space that removing it, or only its checkpoints, would free."""
    run = RunDir(Path(status.path))
    ends = [phase.ended for phase in status.phases if phase.ended]
    return Removable(
        run=run,
        status=status,
        bytes=_size(run.checkpoints if checkpoints else run.path),
        ended=max([status.created, *ends]),
    )


def choose_oldest(
    found: Sequence[Removable], *, before: str | None, most_bytes: int | None
) -> list[Removable]:
    """Return the runs that ended before a time, and the oldest until the rest fits `most_bytes`."""
    oldest = sorted(found, key=lambda each: (each.ended, each.run.name))
    left = sum(each.bytes for each in oldest)
    chosen = []
    for each in oldest:
        too_old = before is not None and each.ended < before
        if each.bytes and (too_old or (most_bytes is not None and left > most_bytes)):
            chosen.append(each)
            left -= each.bytes
    return chosen


def remove(each: Removable, *, checkpoints: bool) -> None:
    """Remove a run or its checkpoints; refuse if the run runs again."""
    run, group = each.run, each.status.group
    if not run_status(run, leftovers=True).final:
        raise RunError(f"{run.name} runs again: nothing was removed")
    try:
        if checkpoints:
            shutil.rmtree(run.checkpoints)
            return
        # A half-removed directory is hidden: not listed, and its name is free for a new run.
        hidden = run.path.with_name(f"{_HIDDEN}{run.name}-{os.getpid()}")
        run.path.rename(hidden)
        RunDir(hidden).record_file.unlink(missing_ok=True)
        shutil.rmtree(hidden)
        if group:
            remove_arrays(run.path.with_name(group))
    except OSError as error:
        where = error.filename or run.path
        raise RunError(f"{where}: cannot be removed ({error.strerror})") from None


def remove_arrays(sweep: Path) -> None:
    """Remove the job arrays of a sweep whose runs are all removed, and then its directory."""
    if not sweep.is_dir() or not is_ours(sweep):
        return
    for place in sweep.glob(ARRAY.format("*")):
        if not any(link.exists() for link in place.iterdir() if link.is_symlink()):
            shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):  # other arrays are in it
        sweep.rmdir()


def _size(directory: Path) -> int:
    """Return the disk usage of a directory in bytes; a file with two names counts once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    left = [directory]
    while left:
        try:
            entries = [*os.scandir(left.pop())]
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left.append(Path(entry.path))
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if info.st_nlink == 1 or (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
    return total
