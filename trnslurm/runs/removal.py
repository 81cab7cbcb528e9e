"""Removes runs or their checkpoints, unless a run is protected or may still be running."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from trnslurm.contract.checkpoints import newest_checkpoint, saves_in
from trnslurm.contract.files import read_json
from trnslurm.contract.halving import read_halving
from trnslurm.contract.rundir import ARRAY, HALVING, PACKAGE, RUNG
from trnslurm.contract.times import changed_at
from trnslurm.errors import RunError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.records.foreign import is_ours, refuse_foreign
from trnslurm.records.run import RunDir
from trnslurm.runs.by_hand import refuse_by_hand
from trnslurm.runs.find import find_runs, list_runs
from trnslurm.runs.status import RunStatus, run_status, statuses_of

_HIDDEN = ".removed-"


class Removable(Frozen):
    """A run that has ended, and the space that its removal would free."""

    run: RunDir
    status: RunStatus
    bytes: int
    """The disk space that the removal frees."""
    ended: str
    """When the run ended, or when it was submitted if that is unknown, in the records' format."""


def _refuse_needed(status: RunStatus, others: Sequence[RunStatus]) -> None:
    """Refuse to remove a run that is protected, still running, or needed by another run."""
    run = RunDir(Path(status.path))
    refuse_foreign(run.path, "remove")
    if run.path.is_symlink():  # its target would lose its record, and stay
        raise RunError(f"{run.path} is a symbolic link: name the run itself, {run.path.readlink()}")
    refuse_by_hand(run, run.record(), "remove the directory itself")
    if status.kept:
        raise RunError(f"{status.run} is protected: first run trnslurm keep --undo {status.run}")
    if not status.final or status.mend == f"trnslurm cancel {status.run}":
        raise RunError(f"{status.run} is {status.state}: first run trnslurm cancel {status.run}")
    for other in others:
        if not other.final and other.path != status.path and _starts_from(other, status):
            raise RunError(f"{other.run}, which is {other.state}, starts from {status.run}")


def _starts_from(run: RunStatus, other: RunStatus) -> bool:
    """Check whether a run starts from the result of another run."""
    if other.run in (run.after, *run.needs):
        return True
    train = read_json(RunDir(Path(run.path)).plan_file).get("train")
    source = train.get("init_from") if isinstance(train, dict) else None
    return isinstance(source, str) and f"{source}/".startswith(f"{other.path}/")


def _removable(status: RunStatus, *, checkpoints: bool) -> Removable:
    """Return a run with the space freed by removing it, or only its checkpoints."""
    run = RunDir(Path(status.path))
    ends = [phase.ended for phase in status.phases if phase.ended]
    return Removable(
        run=run,
        status=status,
        bytes=sum(map(_size, checkpoints_of(run) if checkpoints else [run.path])),
        ended=max([status.created, *ends]),
    )


def checkpoints_of(run: RunDir) -> list[Path]:
    """Return the directories of a run that contain nothing but its checkpoints.

    A custom script's key `checkpoints` names a directory in its copy of the project. The project
    may have files there, or a symbolic link that leads out of the run.
    """
    work, place = run.path / "work", saves_in(run)
    found = [run.checkpoints]
    if work in place.parents and work.resolve() in place.resolve().parents:
        of_project = (run.code / "project" / place.relative_to(work)).exists()
        found += [] if of_project else [place.resolve()]
    return [place for place in found if place.is_dir() and not place.is_symlink()]


def left_over(run: RunDir) -> str:
    """Return, in words, which of a custom script's files remain if its checkpoints are removed."""
    own, newest = checkpoints_of(run), newest_checkpoint(run)
    places = [newest] if newest else []
    places += [saves_in(run)] if changed_at(saves_in(run)) else []
    if run.project_file.exists() and not any(map(_size, own)):
        places.append(run.path / "work")
    for place in (place.resolve() for place in places):
        if place in own or not {*own}.isdisjoint(place.parents):
            continue
        if run.path.resolve() not in place.parents:
            return f"{run.name}: keeping {place}, because it is not in the run directory"
        if place.exists():
            whole = f"trnslurm rm {run.name} removes the whole run"
            return (
                f"{run.name}: keeping {place}, because it may contain more than checkpoints; "
                f"{whole}"
            )
    return ""


def named(words: Sequence[str], roots: list[Path], *, checkpoints: bool) -> list[Removable]:
    """Return the named runs. Refuse if one of them must be kept."""
    wanted = {run.path for word in words for run in find_runs(word, roots)}
    every = wanted | {run.path for run in list_runs(roots)}
    statuses, _ = statuses_of([RunDir(path) for path in every])
    chosen = [status for status in statuses if Path(status.path) in wanted]
    for status in chosen:
        _refuse_needed(status, statuses)
    return [_removable(status, checkpoints=checkpoints) for status in chosen]


def oldest(
    roots: list[Path], *, checkpoints: bool, before: str | None, most_bytes: int | None
) -> list[Removable]:
    """Return the runs that ended before a time, and the oldest until the rest fits `most_bytes`.

    Runs that must be kept are left out.
    """
    statuses, _ = statuses_of(list_runs(roots))
    found = []
    for status in statuses:
        try:
            _refuse_needed(status, statuses)
        except TrnslurmError:
            continue
        found.append(_removable(status, checkpoints=checkpoints))
    found.sort(key=lambda each: (each.ended, each.run.name))
    left = sum(each.bytes for each in found)
    chosen = []
    for each in found:
        too_old = before is not None and each.ended < before
        if each.bytes and (too_old or (most_bytes is not None and left > most_bytes)):
            chosen.append(each)
            left -= each.bytes
    return chosen


def remove(each: Removable, *, checkpoints: bool) -> None:
    """Remove a run or its checkpoints. Refuse if the run has started again."""
    run, group = each.run, each.status.group
    if not run_status(run, leftovers=True).final:
        raise RunError(f"{run.name} is running again: nothing was removed")
    try:
        if checkpoints:
            for directory in checkpoints_of(run):
                shutil.rmtree(directory)
            if not newest_checkpoint(run):
                run.saved_file.unlink(missing_ok=True)
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
        raise RunError(f"cannot remove {where} ({error.strerror})") from None


def remove_arrays(sweep: Path) -> None:
    """Remove the job arrays of a sweep whose runs have all been removed, and then its directory."""
    if not sweep.is_dir() or not is_ours(sweep):
        return
    halving = read_halving(sweep)
    if halving and not any((sweep.parent / run).exists() for run in halving.runs):
        for place in sweep.glob(RUNG.format("*")):
            shutil.rmtree(place, ignore_errors=True)
        for name in (HALVING, Path(PACKAGE).name):
            (sweep / name).unlink(missing_ok=True)
    for place in sweep.glob(ARRAY.format("*")):
        if not any(link.exists() for link in place.iterdir() if link.is_symlink()):
            shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):  # other arrays are in it
        sweep.rmdir()


def _size(directory: Path) -> int:
    """Return the disk usage of a directory in bytes. A file with two names counts once."""
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
