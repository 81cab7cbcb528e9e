"""Arrays that a node's workers share: files on its disk, each made once and mapped by all.

Arrays in use are in the page cache, so no worker waits for the disk. After a job is killed, its
arrays take up no memory.

The first worker that needs an array makes it. The others wait for its lock, which the kernel
releases if that worker dies. So there is no leader, and the files are the only state. If arrays
cannot be shared, each worker makes its own.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trnslurm.contract.files import is_private

_PREFIX = "trnslurm-shards"
# Every worker that uses a directory holds this lock: a directory without a holder is abandoned.
_USED = "used"
# Used if the disk is full or cannot be written to.
_MEMORY = Path("/dev/shm")
_ALONE = "each worker decodes its own"


class NodeArrays:
    """A directory of arrays of one type, by number."""

    def __init__(self, directory: Path, dtype: np.dtype[Any], say: Callable[[str], None]) -> None:
        """Join the workers that use a directory; the first worker creates it."""
        self._directory, self._dtype, self._say = directory, dtype, say
        self.close = weakref.finalize(self, _leave, _hold(directory), directory)
        """Release the directory; the last worker removes it."""

    def get(self, number: int, length: int, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return an array of a known length, made by this worker if no other worker has made it."""
        path = self._directory / str(number)
        made: NDArray[Any] | None = None
        try:
            while (found := self._map(path, length)) is None:
                # The file that is written is also the lock: it is gone once the array has its name.
                with path.with_suffix(".new").open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    if _is_at(file, Path(file.name)) and self._map(path, length) is None:
                        made = make() if made is None else made
                        _write(file, made, path)
        except OSError as error:
            self._say(f"{self._directory}: {error.strerror}: shards cannot be kept there: {_ALONE}")
            self._say = _say_nothing  # once is enough
            return make() if made is None else made
        return found

    def drop(self, number: int) -> None:
        """Remove an array's name; its memory is freed when no worker maps it any more."""
        with contextlib.suppress(OSError):
            (self._directory / str(number)).unlink()

    def _map(self, path: Path, length: int) -> NDArray[Any] | None:
        size = length * self._dtype.itemsize
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    return None
                return np.frombuffer(
                    mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), self._dtype
                )
        except FileNotFoundError:
            return None


def share(
    key: str, size: int, dtype: np.dtype[Any], say: Callable[[str], None]
) -> NodeArrays | None:
    """Join the node's workers that use the same key, in a place with room for `size` bytes.

    Files that killed workers left on the node are removed first.
    """
    bases = list(dict.fromkeys((Path(tempfile.gettempdir()), _MEMORY)))
    for base in bases:
        with contextlib.suppress(OSError):
            _remove_abandoned(base)
            directory = base / f"{_PREFIX}-{os.getuid()}-{key}"
            # If another worker has made the directory, there was room.
            if directory.exists() or shutil.disk_usage(base).free >= size:
                return NodeArrays(directory, dtype, say)
    say(f"{' and '.join(map(str, bases))}: no room for {size / 1e6:,.0f} MB of shards: {_ALONE}")
    return None


def _write(file: IO[bytes], array: NDArray[Any], path: Path) -> None:
    """Write an array from the start of an open file, and give the file its name."""
    new = Path(file.name)
    try:
        file.truncate(0)
        file.write(array.view(np.uint8).data)
        file.flush()
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _say_nothing(text: str) -> None:
    pass


def _hold(directory: Path) -> IO[bytes]:
    """Make a directory that belongs to this user, and hold it."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        _check_ours(directory)
        with contextlib.suppress(FileNotFoundError):  # just removed
            lock = (directory / _USED).open("ab")
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, directory / _USED):
                return lock
            lock.close()


def _leave(lock: IO[bytes], directory: Path) -> None:
    """Release a directory; remove it if no other worker holds it."""
    with lock, contextlib.suppress(OSError):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked from this one has the file too


def _remove_abandoned(base: Path) -> None:
    for directory in base.glob(f"{_PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            _check_ours(directory)
            _leave((directory / _USED).open("ab"), directory)


def _check_ours(directory: Path) -> None:
    """Refuse a directory that another user could have made."""
    if not is_private(directory):
        raise PermissionError(0, "is not this user's private directory", str(directory))


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
