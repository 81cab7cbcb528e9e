"""How files, most of them JSON, are written and read.

A writer gives a file the permissions of its directory, whatever the shell's umask. A reader does
not trust any file: it can be missing, half written, huge or not a regular file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_MAX_BYTES = 16 << 20
_USUAL_BYTES = 64 << 10  # a buffer of _MAX_BYTES takes ten times longer to allocate than to fill
_TAIL_BYTES = 64 << 10
_PART_BYTES = 256 << 10
_MOST_DIGITS = 300
_LINES_AT_ONCE = 256


def open_file(file: Path) -> BinaryIO:
    """Open a regular file for reading; do not block on a pipe."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def read_file(file: Path, most_bytes: int = _MAX_BYTES) -> bytes:
    """Return the contents of a regular file; raise an OSError if it exceeds `most_bytes`."""
    with open_file(file) as stream:
        text = stream.read(_USUAL_BYTES)
        if len(text) == _USUAL_BYTES:
            text += stream.read(max(0, most_bytes + 1 - len(text)))
    if len(text) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB", str(file))
    return text


def sha256_of(stream: BinaryIO) -> str:
    """Return the checksum of a stream's bytes; hashlib.file_digest is new in Python 3.11."""
    import hashlib  # slow to import, and most commands do not need it

    whole = hashlib.sha256()
    while part := stream.read(_PART_BYTES):
        whole.update(part)
    return whole.hexdigest()


def load_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise an OSError or a ValueError if there is none."""
    return _parse(read_file(file))


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it is missing or damaged."""
    try:
        return load_json(file)
    except (OSError, ValueError):
        return {}


def newer_format(told: Mapping[str, Any], known: int) -> str:
    """Return why a newer trnslurm's file cannot be read; empty if it can."""
    number = told.get("format")
    if isinstance(number, int) and number > known:
        return (
            f"made by a newer trnslurm (format {number}, but this one reads {known}): update "
            "trnslurm"
        )
    return ""


def umask_of(directory: Path) -> int:
    """Return the umask that gives new files the permissions of their directory.

    Only the owner gets write permission, because whoever writes run.json or the code decides what
    its owner runs.
    """
    return 0o022 | 0o077 & ~directory.stat().st_mode


def make_directory(directory: Path) -> None:
    """Make a directory with the permissions of its parent (`umask_of`), unless it exists."""
    mode = 0o777 & ~umask_of(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=mode)
        made = directory.stat().st_mode
        if made & 0o777 != mode:  # the shell's umask removed more
            directory.chmod(mode | made & stat.S_ISGID)


def make_private(directory: Path) -> None:
    """Make a directory and its missing parents, only for this user, unless it exists.

    https://specifications.freedesktop.org/basedir-spec requires this for the user's directories.
    With `parents`, mkdir would make the parents with the shell's umask.
    """
    if not directory.is_dir():
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def write_file(file: Path, data: bytes) -> None:
    """Replace a file atomically; it gets the permissions of its directory (`umask_of`)."""
    with _written(file, data) as temporary:
        temporary.replace(file)


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file in the same way as `write_file`."""
    write_file(file, _json(data))


def write_json_once(file: Path, data: Any) -> bool:
    """Write a JSON file atomically unless it exists; return whether it was written."""
    with _written(file, _json(data)) as temporary:
        try:
            os.link(temporary, file)
        except FileExistsError:
            return False
    return True


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the object on every complete line; skip lines that are truncated or being written."""
    for line in lines:
        try:
            yield _parse(line)
        except ValueError:
            continue


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects on all complete lines of a file."""
    with open_file(file) as stream:
        lines = stream.readlines()
    found: list[dict[str, Any]] = []
    for start in range(0, len(lines), _LINES_AT_ONCE):
        some = lines[start : start + _LINES_AT_ONCE]
        try:  # parsed as one array, which takes a quarter of the time
            objects = json.loads(b"[%s]" % b",".join(some), parse_int=_int)
        except (ValueError, RecursionError, MemoryError):
            objects = []
        sound = len(objects) == len(some) and all(isinstance(each, dict) for each in objects)
        found += objects if sound else _json_lines(some)
    return found


def first_line(file: Path) -> dict[str, Any]:
    """Return the object on a file's first line; empty if there is none yet."""
    try:
        with open_file(file) as stream:
            return next(_json_lines([stream.readline(_MAX_BYTES)]), {})
    except OSError:
        return {}


def last_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects on a file's last complete lines, last line first.

    Only the end of the file is read.
    """
    try:
        with open_file(file) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return
    yield from _json_lines(reversed(lines))


def last_line(file: Path) -> dict[str, Any]:
    """Return the object on a file's last complete line; empty if there is none."""
    return next(last_lines(file), {})


def _parse(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_int=_int)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deeply, or too large ({error})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _int(digits: str) -> int:
    """Return an integer; raise a ValueError if it is too large for a float to be a measurement."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    return int(digits)


def _json(data: Any) -> bytes:
    return f"{json.dumps(data, indent=2)}\n".encode()


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file to an error in the block, because write errors, as on a full disk, have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


@contextlib.contextmanager
def _written(file: Path, data: bytes) -> Iterator[Path]:
    """Write the data to a hidden file next to `file`, which the block then renames."""
    temporary = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    mode = 0o666 & ~umask_of(file.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with naming(file), os.fdopen(os.open(temporary, flags, mode), "wb") as stream:
            if stat.S_IMODE(os.fstat(stream.fileno()).st_mode) != mode:  # the umask removed more
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(stream.fileno(), mode)
            stream.write(data)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def is_private(directory: Path, *, readable: bool = False) -> bool:
    """Check whether a path is this user's own directory, which others can neither write nor read.

    With `readable`, others may read the directory. A link counts as the link, not as its target.
    """
    try:
        status = directory.lstat()
    except OSError:
        return False
    closed = 0o022 if readable else 0o077
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return own and not status.st_mode & closed
