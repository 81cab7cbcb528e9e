"""Keeps what takes long to compute of files' content, in the user's cache.

It is kept under a hash of all that it was made of, the program that made it included: there is
nothing to go stale. It is believed only from a directory into which nobody else can write, and only
whole. Whatever the cache lacks, or cannot take, is computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trnslurm import __version__
from trnslurm.rundir import read_file

_MOST = 64  # results; the oldest are removed
_DIGEST_BYTES = 32


def kept(program: str, made_of: Sequence[str | bytes], compute: Callable[[], bytes]) -> bytes:
    """Return what `compute` returns, which the source file `program` makes of `made_of` alone."""
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
        _write(file, hashlib.sha256(result).digest() + result)
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
    """Return the directory of results; an OSError if anybody else could have written them."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    directory = place / "trnslurm/rendering"
    if not directory.is_absolute():
        raise FileNotFoundError(directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is open to others")
    return directory


def _write(file: Path, data: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
