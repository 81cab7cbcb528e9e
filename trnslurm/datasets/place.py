"""A directory, here or in an object store: its files, and any bytes of them.

Files here are mapped. Of objects in a store, blocks are read and kept in the node's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.datasets.cache import Cache
from trnslurm.datasets.errors import DataError

_BLOCK = 4 << 20
_SMALL = 64 << 20
"""The largest index or the like that is read as a whole."""
_MAPPED = 256
_TRIES, _WAIT_S = 5, 0.5
URL = "://"
"""What a URL has, and no path."""

# The algorithms that formats name their checksums by, as far as Python's library has them.
_HASHES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "blake2b", "blake2s")


class File(NamedTuple):
    """A file of a place."""

    size: int
    version: str
    """Differs when the file has been written again."""


class Place:
    """Where the files of a dataset are. It can be handed to other processes, also by pickle."""

    def __init__(self, path: str, cache: Cache) -> None:
        self.path = path.rstrip("/")
        self.cache = cache

    def find(self, name: str) -> File | None:
        """Return a file; None: there is none."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of all files, sorted; some stores cannot list them."""
        raise NotImplementedError

    def read(self, name: str, start: int, length: int) -> Any:
        """Return these bytes of a file, or of its rest; what has a buffer, not always bytes."""
        raise NotImplementedError

    def below(self, name: str) -> Place:
        """Return the place of a directory in this one."""
        raise NotImplementedError

    def file(self, name: str) -> File:
        """Return a file that must be there."""
        if (found := self.find(name)) is None:
            raise self.error(name, "there is no such file")
        return found

    def text(self, name: str, most: int = _SMALL) -> bytes:
        """Return the bytes of an index or the like."""
        if (size := self.file(name).size) > most:
            raise self.error(name, f"has {size:,} bytes, more than any index that is read here")
        return bytes(self.read(name, 0, size))

    def key(self, name: str, *what: object) -> str:
        """Return the name in the cache of something that is made of a file."""
        told = repr((self.path, name, *self.file(name), *what))
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def error(self, name: str, why: str) -> DataError:
        """Return an error that names a file."""
        return DataError(f"{f'{self.path}/{name}' if name else self.path}: {why}")

    def chunks(self, name: str) -> Iterator[Any]:
        """Yield all bytes of a file."""
        size = self.file(name).size
        for start in range(0, size, _BLOCK):
            yield self.read(name, start, min(_BLOCK, size - start))

    def check(self, name: str, hashes: dict[str, str]) -> None:
        """Compare a file with its checksums, once on this node; raise a DataError if it differs."""

        def compare() -> bytes:
            if wrong := differs(self.chunks(name), hashes):
                raise self.error(name, wrong)
            return b"!"

        self.cache.read(self.key(name, sorted(hashes.items())), 0, 1, compare)


class Here(Place):
    """A directory of this host."""

    def __init__(self, path: str, cache: Cache) -> None:
        super().__init__(path, cache)
        self._maps: OrderedDict[str, Any] = OrderedDict()
        self._files: dict[str, File] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def find(self, name: str) -> File | None:
        if name not in self._files:
            try:
                status = Path(self.path, name).stat()
            except OSError:
                return None
            self._files[name] = File(status.st_size, str(status.st_mtime_ns))
        return self._files[name]

    def names(self) -> list[str]:
        top = Path(self.path)
        return sorted(str(file.relative_to(top)) for file in top.rglob("*") if file.is_file())

    def read(self, name: str, start: int, length: int) -> Any:
        found = self._maps.get(name)
        if found is None:
            found = self._maps[name] = self._map(name)
            if len(self._maps) > _MAPPED:
                self._maps.popitem(last=False)
        return found[start : start + length]

    def below(self, name: str) -> Place:
        return Here(f"{self.path}/{name}", self.cache)

    def _map(self, name: str) -> Any:
        try:
            with Path(self.path, name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.file(name).size:
                    raise self.error(name, "has changed since it was opened")
                return memoryview(
                    mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
                )
        except OSError as error:
            raise self.error(name, f"cannot be read ({error.strerror})") from None


class Away(Place):
    """A prefix in an object store, which a reader knows."""

    def __init__(self, path: str, cache: Cache, reader: Any) -> None:
        super().__init__(path, cache)
        self._reader = reader
        self._files: dict[str, File | None] = {}

    def find(self, name: str) -> File | None:
        if name not in self._files:
            url = self._url(name)
            self._files[name] = self._again(name, lambda: self._reader.find(url))
        return self._files[name]

    def names(self) -> list[str]:
        found = self._again("", lambda: self._reader.files(self.path))
        self._files |= {name: file for name, file in found.items() if file is not None}
        return sorted(found)

    def below(self, name: str) -> Place:
        return Away(self._url(name), self.cache, self._reader)

    def read(self, name: str, start: int, length: int) -> Any:
        end = min(start + length, self.file(name).size)
        parts = [
            self._block(name, number, max(start - number * _BLOCK, 0), end - number * _BLOCK)
            for number in range(start // _BLOCK, -(-end // _BLOCK))
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self, name: str) -> Iterator[Any]:
        size = self.file(name).size
        for start in range(0, size, _BLOCK):  # once through is no use of the cache
            yield self._fetch(name, start, min(_BLOCK, size - start))

    def _url(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _block(self, name: str, number: int, start: int, end: int) -> Any:
        begin = number * _BLOCK
        size = min(_BLOCK, self.file(name).size - begin)
        key = self.key(name, number)
        return self.cache.read(
            key, start, min(end, size) - start, lambda: self._fetch(name, begin, size)
        )

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        url, version = self._url(name), self.file(name).version

        def fetch() -> bytes:
            data: bytes = self._reader.read(url, start, length, version)
            if len(data) != length:
                raise OSError(f"{len(data):,} of {length:,} bytes came")
            return data

        return bytes(self._again(name, fetch))

    def _again(self, name: str, ask: Callable[[], Any]) -> Any:
        """Ask the store, again after a failure; raise a DataError when it has failed often."""
        for attempt in itertools.count(1):
            try:
                return ask()
            except DataError:
                raise
            except Exception as error:  # each store's library has its own
                if attempt == _TRIES:
                    words = " ".join(str(error).split())[:200] or type(error).__name__
                    why = f"cannot be read in {_TRIES} tries ({words})"
                    raise self.error(name, why) from error
                # Not the random numbers of the script, whose order would depend on failures.
                time.sleep(_WAIT_S * 2**attempt * random.SystemRandom().uniform(0.5, 1))
        raise AssertionError


class S3:
    """Reads S3 with the client of the copies of checkpoints.

    Not with fsspec: s3fs needs a version of botocore that boto3 does not take.
    """

    def __init__(self) -> None:
        self._stores: dict[tuple[int, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_stores": {}}

    def find(self, url: str) -> File | None:
        store, name = self._at(url)
        found = store.find(name)
        return File(found.bytes, found.etag) if found else None

    def files(self, url: str) -> dict[str, File]:
        store, name = self._at(url)
        prefix = f"{name}/" if name else ""
        return {
            each.name[len(prefix) :]: File(each.bytes, each.etag) for each in store.objects(prefix)
        }

    def read(self, url: str, start: int, length: int, version: str) -> bytes:
        store, name = self._at(url)
        data: bytes = store.read_part(name, start, length, version)
        return data

    def _at(self, url: str) -> tuple[Any, str]:
        from trnslurm.mirror.store import Store

        bucket, _, name = url.removeprefix("s3://").partition("/")
        key = (os.getpid(), bucket)  # a client's connections are not for a forked process
        if key not in self._stores:
            self._stores[key] = Store(f"s3://{bucket}")
        return self._stores[key], name


class ByFsspec:
    """Reads any other store that fsspec knows."""

    def find(self, url: str) -> File | None:
        files, path = self._at(url)
        try:
            return _as_file(files.info(path))
        except FileNotFoundError:
            return None

    def files(self, url: str) -> dict[str, File | None]:
        files, path = self._at(url)
        found, top = files.find(path, detail=True), path.rstrip("/") + "/"
        return {
            name[len(top) :]: _as_file(each) if each.get("size") is not None else None  # https
            for name, each in found.items()
        }

    def read(self, url: str, start: int, length: int, version: str) -> bytes:
        files, path = self._at(url)
        data: bytes = files.cat_file(path, start=start, end=start + length)
        return data

    def _at(self, url: str) -> tuple[Any, str]:
        try:
            import fsspec

            # It keeps file systems, and makes others in a forked process.
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{url}: {str(error).splitlines()[0]}: pip install 'trnslurm[stores]'"
            ) from None
        return found


def _as_file(info: Any) -> File:
    if info.get("type") == "directory" or info.get("size") is None:
        raise FileNotFoundError(info.get("name"))
    known = ("etag", "ETag", "md5Hash", "generation", "mtime", "last_modified", "created")
    return File(int(info["size"]), str([info[name] for name in known if name in info]))


def differs(chunks: Iterator[Any], hashes: dict[str, str]) -> str:
    """Compare bytes with their checksums; return what is wrong, or nothing."""
    found = {name: hashlib.new(name, usedforsecurity=False) for name in hashes if name in _HASHES}
    if "xxh64" in hashes or "xxh128" in hashes:
        with contextlib.suppress(ImportError):
            import xxhash

            found |= {
                name: getattr(xxhash, name)() for name in ("xxh64", "xxh128") if name in hashes
            }
    for chunk in chunks if found else ():
        for each in found.values():
            each.update(chunk)
    wrong = [name for name, each in found.items() if each.hexdigest() != hashes[name].lower()]
    return f"its {wrong[0]} is not as the index says: damaged, or another file" if wrong else ""


def open_place(path: str, cache: Cache) -> Place:
    """Return the place of a path or URL."""
    if URL not in path:
        return Here(str(_absolute(path)), cache)
    return Away(path, cache, S3() if path.startswith("s3://") else ByFsspec())


def _absolute(path: str) -> Path:
    return Path.cwd() / Path(path).expanduser()


def split_path(path: str) -> tuple[str, str]:
    """Return the directory of a path or URL, and the last name; of a bucket itself none."""
    if URL not in path:
        return str(_absolute(path).parent), _absolute(path).name
    parent, _, name = path.rstrip("/").rpartition("/")
    return (path, "") if parent.endswith("/") else (parent, name)
