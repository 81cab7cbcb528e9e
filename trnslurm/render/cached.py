"""Caches slow computations on file contents in the user's cache directory.

The cache key is a hash of all inputs and the program, so results never go stale. A result is used
only if it is complete, and only if no other user can write to the directory. Without a usable
cache, the result is computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trnslurm import __version__
from trnslurm.contract.files import make_private, read_file, write_file

_MOST = 128  # results; the oldest are removed
_DIGEST_BYTES = 32


def cached(program: str, made_of: Sequence[str | bytes], compute: Callable[[], bytes]) -> bytes:
    """Return the result of `compute`, which depends only on `made_of` and the file `program`."""
    try:
        key = _key(program, made_of)
        directory = own_directory()
    except (OSError, RuntimeError):  # a user without a home
        return compute()
    file = directory / key
    with contextlib.suppress(OSError):
        data = read_file(file)
        if data[:_DIGEST_BYTES] == hashlib.sha256(data[_DIGEST_BYTES:]).digest():
            return data[_DIGEST_BYTES:]
    result = compute()
    with contextlib.suppress(OSError):
        write_file(file, hashlib.sha256(result).digest() + result)
        for old in sorted(directory.iterdir(), key=lambda f: f.stat().st_mtime)[:-_MOST]:
            old.unlink()
    return result


def _key(program: str, made_of: Sequence[str | bytes]) -> str:
    parts = [__version__, sys.version, Path(program).read_bytes(), *made_of]
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(b"%d:%b" % (len(data), data))
    return whole.hexdigest()


def own_directory() -> Path:
    """Return the cache directory; raise an OSError if another user can write to it."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    directory = place / "trnslurm/rendering"
    if not directory.is_absolute():
        raise FileNotFoundError(directory)
    make_private(directory)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is writable by other users")
    return directory
