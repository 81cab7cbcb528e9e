"""The directory of checkpoints, and changes to it that survive a crash at any moment.

step-00000017 a complete checkpoint, or one that was damaged later step-00000017.tmp-3 attempt 3 is
writing it, or died while writing it step-00000017.removed-3 attempt 3 is deleting it
step-00000017.damaged-3 attempt 3 found it damaged; kept for inspection
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from trnslurm.contract.checkpoints import damaged_name, is_removed, removed_name, writer_of


def fsync_file(file: BinaryIO) -> None:
    """Wait until everything written to a file is on the disk."""
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
    """Rename within the directory; fail if the target exists and is not empty."""
    source.rename(target)
    fsync_directory(target.parent)


def set_aside(checkpoint: Path, attempt: int) -> Path:
    """Rename a damaged checkpoint so that it no longer counts."""
    name = damaged_name(checkpoint.name, attempt)
    aside = checkpoint.with_name(name)
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{name}.{number}")
    rename_durably(checkpoint, aside)
    return aside


def put_in_place(temporary: Path, checkpoint: Path, attempt: int) -> None:
    """Rename a directory to a checkpoint's name, which makes the checkpoint exist."""
    removed = None
    # Only while this attempt has its temporary directory: a newer attempt that has removed it may
    # have made the existing checkpoint of this step.
    if temporary.is_dir() and checkpoint.exists():
        # No attempt resumed from it, or this step would not have been repeated.
        removed = _take_name(checkpoint, attempt)
    try:
        rename_durably(temporary, checkpoint)
    except OSError:
        if removed:
            removed.rename(checkpoint)
        raise


def remove(directory: Path, attempt: int) -> None:
    """Delete a directory; rename it first, so that a partial one never looks complete."""
    removed = _take_name(directory, attempt)
    fsync_directory(removed.parent)
    _delete(removed)


def _take_name(directory: Path, attempt: int) -> Path:
    return directory.rename(directory.with_name(removed_name(directory.name, attempt)))


def finish_removals(root: Path) -> None:
    """Finish deletions that were interrupted."""
    for path in list(root.iterdir()):
        if is_removed(path.name):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a directory, or only the link if a user has moved a checkpoint and linked it back."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def sweep(root: Path, attempt: int) -> None:
    """Delete checkpoints that earlier attempts left half written or half deleted.

    This also stops an earlier attempt that is still running, because the directory that it would
    commit is gone.
    """
    finish_removals(root)
    for path in list(root.iterdir()):
        writer = writer_of(path.name)
        if writer is not None and writer <= attempt:
            remove(path, attempt)
