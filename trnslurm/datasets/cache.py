"""A cache on a node's disk, shared by the node's workers: pieces of data, up to a limit in bytes.

A piece is a file, which gets its final name when it is complete. While it is being written, the
file is also the lock that keeps other workers from making the same piece. The kernel releases the
lock if the writer dies, and what a killed writer left behind is removed when room is needed. There
is no leader, and the files are the only state.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trnslurm.contract.files import is_private, make_private
from trnslurm.datasets.errors import DataError

_NEW = ".new"
_TOTAL = "total"
"""Contains the total size of all pieces, which is never too low. Its lock guards reservations."""
_ROOM = 0.9
"""When the limit is exceeded, the oldest pieces are removed until this share of it is in use."""
_OF_FREE = 0.8
_TOUCH_S = 1.0
"""A use is recorded only if the last recorded use is longer ago than this."""

Make = Callable[[], Any]
"""Makes a piece: returns bytes, or an object that supports the buffer protocol."""


class Cache:
    """A directory of pieces."""

    def __init__(self, directory: Path | None, limit: int) -> None:
        """Use a directory that only this user can access, and create it if it is missing."""
        self.directory = directory or Path(tempfile.gettempdir(), f"trnslurm-data-{os.getuid()}")
        try:
            make_private(self.directory)
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise DataError(
                f"{self.directory}: cannot be used as a cache ({error.strerror})"
            ) from None
        if not is_private(self.directory):
            raise DataError(
                f"{self.directory}: the cache must be a directory that only you can use"
            )
        self.limit = min(limit, int(_OF_FREE * (free + self._count(tidy=False)[0])))

    def read(self, key: str, start: int, length: int, make: Make) -> Any:
        """Return some bytes of a piece; make the piece if no worker of this node has yet."""
        file = self._find(key)
        if file is None:
            file = self._make(key, make)
        if not isinstance(file, int):
            return file[start : start + length]
        try:
            return os.pread(file, length, start)
        finally:
            os.close(file)

    def map(self, key: str, make: Make) -> Any:
        """Return a complete piece, mapped so that it takes up no memory of this process."""
        file = self._find(key)
        if file is None:
            file = self._make(key, make)
        if not isinstance(file, int):
            return file
        try:
            size = os.fstat(file).st_size
            return memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ) if size else b"")
        finally:
            os.close(file)

    def _find(self, key: str) -> int | None:
        try:
            file = os.open(self.directory / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if time.time() - os.fstat(file).st_mtime > _TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(file)
        return file

    def _make(self, key: str, make: Make) -> Any:
        """Make a piece; return its open file, or the piece itself if there is no room now."""
        path, new = self.directory / key, self.directory / (key + _NEW)
        while True:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(file, new):
                    continue  # another worker has made the piece, or has failed to
                if (found := self._find(key)) is not None:
                    new.unlink()
                    return found
                piece = memoryview(make()).cast("B")
                if len(piece) > self.limit:
                    raise DataError(
                        f"the cache {self.directory} is limited to {self.limit:,} bytes, but one "
                        f"piece is {len(piece):,} bytes: raise the limit or use another directory"
                    )
                if not self._written(file, piece):
                    new.unlink(missing_ok=True)
                    return piece
                with self._locked():  # a count of the files could miss one that is being renamed
                    new.rename(path)
                fcntl.flock(file, fcntl.LOCK_UN)
                found, file = file, -1
                return found
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            finally:
                if file >= 0:
                    os.close(file)

    def _written(self, file: int, piece: memoryview) -> bool:
        """Write a piece durably; return whether there was room for it."""
        try:
            if not self._reserve(file, len(piece)):
                return False
            with open(file, "r+b", closefd=False) as stream:
                stream.write(piece)
            os.fdatasync(file)
        except OSError:  # the disk is full, or fails: the piece is used from memory
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        with (self.directory / _TOTAL).open("a+b") as total:
            fcntl.flock(total, fcntl.LOCK_EX)
            yield total

    def _reserve(self, file: int, size: int) -> bool:
        """Reserve space for a new file by evicting old pieces; return whether there is enough."""
        with self._locked() as total:
            total.seek(0)
            held = total.read(8)
            used = struct.unpack("<q", held)[0] if len(held) == 8 else self.limit
            if used + size > self.limit:
                used, pieces = self._count(tidy=True)
                for path, bytes_there in pieces:
                    if used + size <= max(self.limit * _ROOM, size):
                        break
                    path.unlink(missing_ok=True)
                    used -= bytes_there
            fits = used + size <= self.limit
            if fits:
                os.truncate(file, size)
            total.truncate(0)
            total.write(struct.pack("<q", used + size * fits))
        return fits

    def _count(self, *, tidy: bool) -> tuple[int, list[tuple[Path, int]]]:
        """Return the bytes in use, and the pieces from the least to the most recently used."""
        used, pieces = 0, []
        for path, status in self._files():
            if path.suffix != _NEW:
                pieces.append((status.st_mtime, path, status.st_size))
            elif tidy and _abandoned(path):
                path.unlink(missing_ok=True)
                continue
            used += status.st_size
        return used, [(path, size) for _, path, size in sorted(pieces)]

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name != _TOTAL:
                    with contextlib.suppress(FileNotFoundError):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)


def _is_at(file: int, path: Path) -> bool:
    """Check whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _abandoned(path: Path) -> bool:
    """Check whether a file was left behind by a writer that has died."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(file)
    except OSError:
        return False
    return True
