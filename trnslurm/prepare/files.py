"""Writes files and directories that appear completely or not at all, and reads JSON."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from trnslurm.prepare.errors import KeptError, PrepareError


def parse(data: str | bytes) -> Any:
    """Parse JSON; raise ValueError for any problem."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, or None if it is missing or damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when it is complete and on disk.

    A file that is not durable survives a kill of its writer, but not a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(directory: Path) -> None:
    """Sync a directory, so that the names in it are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def partial(output: Path, key: str) -> Iterator[Path]:
    """Yield the work directory of an output. It stays for the next run unless the work is done.

    The same key always has the same directory, so a run after a kill finds the finished work. Only
    one process at a time can use the directory. After a PrepareError it is removed, because the
    next run has other inputs.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in output.parents if os.path.lexists(path))
        raise PrepareError(f"{output}: {file} is not a directory: choose another name") from None
    directory = output.with_name(f".{output.name}.partial-{key}")
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        # Another user of this data root could have put any files into it.
        raise PrepareError(
            f"{directory} belongs to another user: remove it, or choose another name"
        )
    with (directory / "lock").open("w") as lock:
        # Without a link, it was removed between mkdir and the lock.
        if not _lock(lock) or not os.fstat(lock.fileno()).st_nlink:
            raise PrepareError(f"{output}: another process is preparing this data right now")
        try:
            yield directory
        except PrepareError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        except OSError as error:
            raise KeptError(f"{error.filename or output}: {error.strerror}") from None
        shutil.rmtree(directory, ignore_errors=True)
    _remove_abandoned(output)


def publish(finished: Path, output: Path) -> None:
    """Give a finished directory its final name, and remove any previous one."""
    sync(finished)
    old = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if output.exists():
        output.rename(old)
    finished.rename(output)
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        print(
            f"warning: {old} was replaced but could not be removed: remove it by hand",
            file=sys.stderr,
        )


def _remove_abandoned(output: Path) -> None:
    """Remove the work of killed runs with other inputs, which no run will finish."""
    for directory in output.parent.iterdir():
        if directory.name.startswith(f".{output.name}.replaced-"):
            shutil.rmtree(directory, ignore_errors=True)
        elif directory.name.startswith(f".{output.name}.partial-"):
            with contextlib.suppress(OSError), (directory / "lock").open("r+") as lock:
                if _lock(lock):
                    shutil.rmtree(directory, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
