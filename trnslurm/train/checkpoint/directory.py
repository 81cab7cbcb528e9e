"""The directory of checkpoints: names in it, and changes that a crash at any moment survives.

step-00000017                what has this name is whole, or was damaged later
step-00000017.tmp-3          attempt 3 is writing it, or died doing so
step-00000017.removed-3      attempt 3 is deleting it
step-00000017.damaged-3      attempt 3 found it damaged; kept for whoever wants to look
"""

import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-(\d+)")
_REMOVED = re.compile(r"step-\d{8,}(\.tmp-\d+)?\.removed-\d+")


def step_directory(root: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return root / f"step-{step:08d}"


def temporary_directory(root: Path, step: int, attempt: int) -> Path:
    """Name what an attempt writes the checkpoint of a step as."""
    return root / f"step-{step:08d}.tmp-{attempt}"


def is_name(name: str) -> bool:
    """Tell whether a name is that of a checkpoint."""
    return _STEP.fullmatch(name) is not None


def step_of(checkpoint: Path) -> int:
    """Give the step that a checkpoint's name says."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1])


def checkpoints_in(root: Path) -> list[Path]:
    """List all checkpoints, newest step first."""
    found = [path for path in root.iterdir() if is_name(path.name)]
    return sorted(found, key=step_of, reverse=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whose content a crash cannot take back; its name needs fsync_directory."""
    with path.open("wb") as file:
        file.write(content)
        fsync_file(file)


def fsync_file(file: BinaryIO) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Rename within the directory; fails where the target is there and not empty."""
    source.rename(target)
    fsync_directory(target.parent)


def set_aside(checkpoint: Path, attempt: int) -> Path:
    """Take a damaged checkpoint out of the way without deleting it."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{attempt}")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{attempt}.{number}")
    rename_durably(checkpoint, aside)
    return aside


def put_in_place(temporary: Path, checkpoint: Path, attempt: int) -> None:
    """Give a directory the name of a checkpoint: from this moment on there is one."""
    removed = None
    # Before one of the same step loses its name: a newer attempt, which has taken this one's
    # temporary directory away, may have made it.
    if temporary.is_dir() and checkpoint.exists():
        # Nobody went on from it, or this step would not have been done again.
        removed = _take_name(checkpoint, attempt)
    try:
        rename_durably(temporary, checkpoint)
    except OSError:
        if removed:
            removed.rename(checkpoint)
        raise


def remove(directory: Path, attempt: int) -> None:
    """Delete a directory: first its name, so that no half of it ever looks whole."""
    removed = _take_name(directory, attempt)
    fsync_directory(removed.parent)
    shutil.rmtree(removed)


def _take_name(directory: Path, attempt: int) -> Path:
    return directory.rename(directory.with_name(f"{directory.name}.removed-{attempt}"))


def finish_removals(root: Path) -> None:
    """Delete what has lost its name already."""
    for path in list(root.iterdir()):
        if _REMOVED.fullmatch(path.name):
            shutil.rmtree(path)


def sweep(root: Path, attempt: int) -> None:
    """Delete what earlier attempts left half written or half deleted.

    It also stops an earlier attempt that still runs: what it is about to commit is no longer there.
    """
    finish_removals(root)
    for path in list(root.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match and int(match[1]) <= attempt:
            remove(path, attempt)


def newer_attempt(state: Path, phase: str, attempt: int) -> int | None:
    """Give the newest attempt of a phase that the batch scripts have begun after this one.

    It lists the directory, because NFS may answer from memory for a file that it did not see
    before, but asks the server anew when a directory is opened.
    """
    pattern = re.compile(rf"{re.escape(phase)}-(\d+)\.json")
    names = [path.name for path in state.iterdir()] if state.is_dir() else []
    attempts = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    newest = max(attempts, default=attempt)
    return newest if newest > attempt else None
