"""A directory on disk or in an object store: its files, and any byte range of them.

Local files are mapped. Objects in a store are read in blocks, which are kept in the node's cache.
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
"""The largest index that is read into memory at once."""
_MAPPED = 256
_TRIES, _WAIT_S = 5, 0.5
URL = "://"
"""Occurs in every URL and in no path."""

# The checksum algorithms that the formats use and Python's standard library provides.
_HASHES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "blake2b", "blake2s")


class File(NamedTuple):
    """The size and version of a file."""

    size: int
    version: str
    """Changes when the file is rewritten."""


class Place:
    """Where the files of a dataset are. It can be passed to other processes, even by pickle."""

    def __init__(self, path: str, cache: Cache) -> None:
        self.path = path.rstrip("/")
        self.cache = cache

    def find(self, name: str) -> File | None:
        """Return a file, or None if it does not exist."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the sorted names of all files. Some stores cannot list them."""
        raise NotImplementedError

    def read(self, name: str, start: int, length: int) -> Any:
        """Return these bytes of a file, cut off at its end, as any object with a buffer."""
        raise NotImplementedError

    def below(self, name: str) -> Place:
        """Return the place of a subdirectory."""
        raise NotImplementedError

    def file(self, name: str) -> File:
        """Return a file, or raise a DataError if it does not exist."""
        if (found := self.find(name)) is None:
            raise self.error(name, "does not exist")
        return found

    def text(self, name: str, most: int = _SMALL) -> bytes:
        """Return all bytes of a small file, such as an index."""
        if (size := self.file(name).size) > most:
            raise self.error(name, f"is {size:,} bytes, more than the limit of {most:,}")
        return bytes(self.read(name, 0, size))

    def key(self, name: str, *what: object) -> str:
        """Return the cache key of something that is derived from a file."""
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
        """Compare a file with its checksums, once per node; raise a DataError if it differs."""

        def compare() -> bytes:
            if wrong := differs(self.chunks(name), hashes):
                raise self.error(name, wrong)
            return b"!"

        self.cache.read(self.key(name, sorted(hashes.items())), 0, 1, compare)


class Here(Place):
    """A directory on this host."""

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
    """A prefix in an object store, read through one of the readers below."""

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
        for start in range(0, size, _BLOCK):  # one pass would not benefit from the cache
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
                raise OSError(f"only {len(data):,} of {length:,} bytes arrived")
            return data

        return bytes(self._again(name, fetch))

    def _again(self, name: str, ask: Callable[[], Any]) -> Any:
        """Query the store, and retry after a failure; raise a DataError after too many failures."""
        for attempt in itertools.count(1):
            try:
                return ask()
            except DataError:
                raise
            except Exception as error:  # each store's library raises its own exceptions
                if attempt == _TRIES:
                    words = " ".join(str(error).split())[:200] or type(error).__name__
                    why = f"could not be read in {_TRIES} attempts ({words})"
                    raise self.error(name, why) from error
                # Not the script's random numbers, whose order would then depend on failures.
                time.sleep(_WAIT_S * 2**attempt * random.SystemRandom().uniform(0.5, 1))
        raise AssertionError


class S3:
    """Reads S3 with the client that also copies checkpoints.

    It does not use fsspec, because s3fs needs a version of botocore that boto3 does not accept.
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
        key = (os.getpid(), bucket)  # a forked process must not use the client's connections
        if key not in self._stores:
            self._stores[key] = Store(f"s3://{bucket}")
        return self._stores[key], name


class ByFsspec:
    """Reads any other store that fsspec supports."""

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

            # fsspec reuses file systems, and makes new ones in a forked process.
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{url}: {str(error).splitlines()[0]}: run pip install '.[stores]' in a clone of "
                "trnslurm"
            ) from None
        return found


def _as_file(info: Any) -> File:
    if info.get("type") == "directory" or info.get("size") is None:
        raise FileNotFoundError(info.get("name"))
    known = ("etag", "ETag", "md5Hash", "generation", "mtime", "last_modified", "created")
    return File(int(info["size"]), str([info[name] for name in known if name in info]))


def differs(chunks: Iterator[Any], hashes: dict[str, str]) -> str:
    """Compare bytes with their checksums; return what is wrong, or an empty string."""
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
    return f"its {wrong[0]} does not match the index" if wrong else ""


def open_place(path: str, cache: Cache) -> Place:
    """Return the place of a path or URL."""
    if URL not in path:
        return Here(str(_absolute(path)), cache)
    return Away(path, cache, S3() if path.startswith("s3://") else ByFsspec())


def _absolute(path: str) -> Path:
    return Path.cwd() / Path(path).expanduser()


def split_path(path: str) -> tuple[str, str]:
    """Split a path or URL into its directory and its last name, which is empty for a bucket."""
    if URL not in path:
        return str(_absolute(path).parent), _absolute(path).name
    parent, _, name = path.rstrip("/").rpartition("/")
    return (path, "") if parent.endswith("/") else (parent, name)
