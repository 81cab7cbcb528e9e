"""Stages a job's Python environment: workers import from a copy on their node's own disk.

    python -m trnslurm.node.staging pack SHARED
    python -m trnslurm.node.staging unpack ARCHIVE LOCAL

Each worker that imports from a shared file system reads thousands of files there. `pack`, once per
attempt, makes one archive of the environment in SHARED, or finds that the last archive is current.
`unpack`, on each node, reads the whole archive into LOCAL, or finds the copy of an earlier job
there. They print the archive, and the Python of the copy. Staging never fails a run: if it is not
possible, it prints a warning with the reason, and the workers use the shared environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trnslurm.contract.files import is_private

KEPT = 3
"""The number of archives, and of copies on a node. The one unused for longest is removed first."""
SIGNS = ("pyvenv.cfg", "conda-meta")
"""A file or directory at the top of an environment, made by venv and uv, or by conda."""
_NEW = ".new-"
_THREADS = 32  # a shared file system serves many requests at once, each with a delay
_AHEAD = 256
_SMALL = 2**20
_BLOCK = 2**20


class StagingError(Exception):
    """The reason why workers use the shared environment."""


class Checksummed(io.BufferedIOBase):
    """A file that is read or written sequentially, and a checksum of its data."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__()
        self._file, self._sum = file, hashlib.blake2b(digest_size=16)

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(size)
        self._sum.update(data)
        return data

    def write(self, data: Any, /) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def checksum(self) -> str:
        return self._sum.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Pack or unpack; print the archive or the copy's Python."""
    words = sys.argv[1:] if argv is None else argv
    if [*words[:1], len(words)] not in (["pack", 2], ["unpack", 3]):
        print("usage: staging pack SHARED | unpack ARCHIVE LOCAL", file=sys.stderr)
        return 2
    paths = [Path(word).expanduser().absolute() for word in words[1:]]
    answer = sys.executable if words[0] == "unpack" else ""
    try:
        answer = str(pack(*paths) if words[0] == "pack" else unpack(*paths))
    except Exception as error:  # whatever the reason, the shared environment still works
        why = error.args[0] if isinstance(error, StagingError) else _words(error)
        host = os.uname().nodename
        print(f"warning: {host}: workers use the shared environment: {why}", file=sys.stderr)
    print(answer)
    return 0


def pack(shared: Path) -> Path:
    """Return an archive of the current state of this Python's environment."""
    prefix = Path(sys.prefix)
    if not any((prefix / sign).exists() for sign in SIGNS):
        raise StagingError(
            f"{sys.executable} does not belong to a virtual environment or a conda environment"
        )
    place, entries = own_directory(shared), list_files(prefix)
    name = identity(entries, str(prefix))
    with _locked(place) as locked:
        made = next(place.glob(f"{name}-*.tar"), None)
        if made is None:
            _make_room(place, place.glob("*.tar"), locked)
            made = _write_archive(prefix, entries, place / name)
        os.utime(made)
    return made


def unpack(archive: Path, local: Path) -> Path:
    """Return the Python interpreter of this node's copy."""
    if not local.is_dir():
        raise StagingError(f"there is no directory {local}")
    place, (name, checksum) = own_directory(local), archive.stem.split("-")
    copy = place / name
    with _locked(place, exclusive=False):  # srun may start all workers of a node at once
        ready = _is_whole(copy, name)
    if not ready:
        with _locked(place) as locked:
            if not _is_whole(copy, name):
                if _in_use(copy):
                    raise StagingError(f"{copy} was modified and is in use: remove it later")
                shutil.rmtree(copy, ignore_errors=True)
                _make_room(place, (p for p in place.iterdir() if p.is_dir()), locked)
                _read_archive(archive, checksum, copy)
    os.utime(copy)
    return copy / "bin/python"


def own_directory(parent: Path) -> Path:
    """Return a directory of this user that no other user can read or replace."""
    if stat.S_IMODE(parent.stat().st_mode) & 0o1002 == 0o002:
        raise StagingError(f"every user can replace files in {parent}: set its sticky bit")
    place = parent / f".trnslurm-{os.getuid()}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    if not is_private(place):
        raise StagingError(f"{place} is not your own directory with mode 0700: remove it")
    return place


def identity(entries: Iterable[tarfile.TarInfo], prefix: str) -> str:
    """Return a checksum of an environment or copy: names, sizes and times of its files.

    It does not read contents, because that would take as long as staging saves. It ignores modes,
    and bytecode, which any use of the environment may add.
    """
    whole = hashlib.blake2b(os.fsencode(prefix))
    for entry in entries:
        if "__pycache__/" not in entry.name:
            about = entry.linkname or f"{entry.size} {entry.mtime}"
            whole.update(os.fsencode(f"\n{entry.name}\0{about}"))
    return whole.hexdigest()[:16]


def list_files(directory: Path) -> list[tarfile.TarInfo]:
    """Return the archive headers for all files and links below a directory, by name.

    Hard links become separate files.
    """

    def header(path: str, status: os.stat_result) -> tarfile.TarInfo:
        member = tarfile.TarInfo(path[start:])
        member.mtime, member.mode = int(status.st_mtime), stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, str(Path(path).readlink())
        else:
            member.size = status.st_size
        return member

    def look(path: str) -> tuple[list[tarfile.TarInfo], list[str]]:
        found, below = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK):
                    found.append(header(entry.path, status))
        return found, below

    start, files, level = len(str(directory)) + 1, [], [str(directory)]
    with ThreadPoolExecutor(_THREADS) as pool:
        while level:
            looked = [*pool.map(look, level)]
            files += [entry for found, _ in looked for entry in found]
            level = [path for _, below in looked for path in below]
    return sorted(files, key=lambda entry: entry.name)


@contextmanager
def _locked(place: Path, *, exclusive: bool = True) -> Iterator[bool]:
    """Wait for the directory's lock; yield False if the file system has no locks."""
    with (place / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        except OSError:  # Lustre without the mount option flock: two processes may do the same work
            yield False
        else:
            yield True


def _make_room(place: Path, made: Iterable[Path], locked: bool) -> None:
    """Remove those unused for longest, and incomplete ones left by dead processes."""
    unused = sorted(
        (path for path in made if not path.name.startswith(_NEW)),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )[KEPT - 1 :]
    for path in (*unused, *(place.glob(f"{_NEW}*") if locked else ())):
        if path.is_dir() and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)


def _in_use(copy: Path) -> bool:
    """Check whether a process of this user has the copy's Python in its environment."""
    mark = os.fsencode(f"={copy}/")
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environ.read_bytes():
                return True
    return False


def _write_archive(prefix: Path, entries: Sequence[tarfile.TarInfo], stem: Path) -> Path:
    begun, host = time.monotonic(), os.uname().nodename
    new = stem.with_name(f"{_NEW}{host}-{os.getpid()}")
    try:
        with new.open("xb") as file:
            out = Checksummed(file)
            with tarfile.open(
                fileobj=out, mode="w|", bufsize=_BLOCK, format=tarfile.GNU_FORMAT
            ) as tar:
                for entry, data in _contents(prefix, entries):
                    tar.addfile(entry, data)
            os.fsync(file.fileno())
        if identity(list_files(prefix), str(prefix)) != stem.name:
            raise StagingError(f"{prefix} changed while it was read")
        archive = new.rename(f"{stem}-{out.checksum()}.tar")
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _say(f"packed {prefix}", archive.stat().st_size, begun)
    return archive


def _contents(
    prefix: Path, entries: Iterable[tarfile.TarInfo]
) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
    """Yield entries with their contents; small files are read ahead, in parallel."""
    waiting: deque[tuple[tarfile.TarInfo, Future[bytes] | None]] = deque()

    def first() -> tuple[tarfile.TarInfo, io.BufferedIOBase | None]:
        entry, read = waiting.popleft()
        if read is not None:
            return entry, io.BytesIO(read.result())
        return entry, (prefix / entry.name).open("rb") if entry.isreg() else None

    with ThreadPoolExecutor(_THREADS) as pool:
        for entry in entries:
            small = entry.isreg() and entry.size <= _SMALL
            read = pool.submit((prefix / entry.name).read_bytes) if small else None
            waiting.append((entry, read))
            if len(waiting) > _AHEAD:
                yield first()
        while waiting:
            yield first()


def _read_archive(archive: Path, checksum: str, copy: Path) -> None:
    begun, new, size = time.monotonic(), copy.with_name(_NEW + copy.name), archive.stat().st_size
    free = shutil.disk_usage(copy.parent).free
    if free < 1.1 * size:  # small files take whole blocks
        raise StagingError(f"{copy.parent} has {_gib(free)} free, but the archive has {_gib(size)}")
    try:
        new.mkdir()
        with archive.open("rb") as file:
            source = Checksummed(file)
            with tarfile.open(fileobj=source, mode="r|", bufsize=_BLOCK) as tar:
                _extract(tar, new)
            while source.read(_BLOCK):
                pass
        if source.checksum() != checksum or not _is_whole(new, copy.name):
            raise StagingError(f"{archive} is damaged: remove it")
        _check_python(new)
        new.rename(copy)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _say(f"unpacked to {copy}", size, begun)


def _extract(tar: tarfile.TarFile, directory: Path) -> None:
    """Write all files, small ones in parallel, because creating files takes most of the time."""
    waiting: deque[Future[None]] = deque()
    parent = directory
    with ThreadPoolExecutor(_THREADS) as pool:
        for member in tar:
            path = directory / member.name
            if path.parent != parent:
                parent = path.parent
                parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                path.symlink_to(member.linkname)
                continue
            data = tar.extractfile(member) or io.BytesIO()
            if member.size > _SMALL:
                _write(path, member, data)
                continue
            waiting.append(pool.submit(_write, path, member, io.BytesIO(data.read())))
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
        while waiting:
            waiting.popleft().result()


def _write(path: Path, member: tarfile.TarInfo, data: IO[bytes]) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, member.mode & 0o777)
    with os.fdopen(number, "wb", buffering=0) as file:
        shutil.copyfileobj(data, file, _BLOCK)
        os.utime(number, (member.mtime, member.mtime))


def _check_python(copy: Path) -> None:
    """Refuse a copy whose Python does not start or imports from another directory."""
    command = [str(copy / "bin/python"), "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode or done.stdout.strip() != str(copy):
        said = [*done.stderr.split("\n"), done.stdout.strip()][-1] or f"exit code {done.returncode}"
        raise StagingError(f"a copy of {sys.prefix} does not run in another directory ({said})")


def _is_whole(copy: Path, name: str) -> bool:
    return copy.is_dir() and identity(list_files(copy), sys.prefix) == name


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _say(what: str, size: int, begun: float) -> None:
    print(f"staging: {what}: {_gib(size)} in {time.monotonic() - begun:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
