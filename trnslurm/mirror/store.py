"""Store: files under a prefix in S3, with a checksum on every transfer.

Credentials, region and endpoint are left to boto3: a role, a profile, single sign-on, or
AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trnslurm.contract import files

INSTALL = "pip install '.[s3]' in a clone of trnslurm"
PLACE = r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_!.*'()=-]+)*)/?"
"""A bucket and a prefix of characters that S3 calls safe, plus = for partitions."""

# S3 accepts parts of 5 MiB to 5 GiB, at most 10,000 (docs.aws.amazon.com, "Multipart upload
# limits").
_PART = 16 << 20
_MOST_PARTS = 9_000
_AT_ONCE = 4
_CHUNK = 1 << 20
_CONNECT_S, _ANSWER_S, _TRIES = 10, 60, 3
_MOST_PAGES = 2_000
"""The page limit of a listing. S3 puts up to 1,000 names on a page; a broken gateway never ends."""
_MD5 = "[0-9a-f]{32}"
_MISSING = {"404", "NoSuchKey", "NotFound", "NoSuchUpload"}


class MirrorError(Exception):
    """S3 refuses, fails or does not answer; the message is one line."""


class ChangedError(MirrorError):
    """A file or object that does not have the expected bytes."""


class Object(NamedTuple):
    """An object in S3."""

    name: str
    bytes: int
    etag: str
    """The ETag as S3 writes it, in quotes."""


class Store:
    """The objects under a prefix in a bucket."""

    def __init__(self, place: str, *, bytes_per_s: float = math.inf) -> None:
        """Open s3://BUCKET/PREFIX without sending a request yet."""
        match = re.fullmatch(PLACE, place)
        if not match:
            raise MirrorError("expected s3://BUCKET/PREFIX, with the bucket in lowercase")
        self.place = place.rstrip("/")
        self._bucket, prefix = match[1], match[2].strip("/")
        self._top = f"{prefix}/" if prefix else ""
        self.pace = Bandwidth(bytes_per_s)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3")
        self._client = _client(_AT_ONCE)
        self.moved = 0
        """The number of bytes sent and fetched."""
        self.on_move: Callable[[], None] = lambda: None
        """Called from time to time while a file is being sent."""

    def size_and_sha256(self, name: str) -> tuple[int, str] | None:
        """Return the size and SHA-256 of an object, or None if it does not exist."""
        try:
            with _one_line(name):
                found = self._client.head_object(**self._at(name))
        except _MissingError:
            return None
        return found["ContentLength"], found.get("Metadata", {}).get("sha256", "")

    def names(self, prefix: str, *, here: bool = False) -> Iterator[str]:
        """Yield the names with a prefix; with `here`, only those without a slash after it."""
        yield from (each.name for each in self.objects(prefix, here=here))

    def objects(self, prefix: str = "", *, here: bool = False) -> Iterator[Object]:
        """Yield the objects with these names."""
        asked = {"Bucket": self._bucket, "Prefix": self._top + prefix}
        asked |= {"Delimiter": "/"} if here else {}
        with _one_line(prefix):
            for page in self._pages("list_objects_v2", **asked):
                for each in page.get("Contents", ()):
                    yield Object(each["Key"][len(self._top) :], each["Size"], each["ETag"])

    def _pages(self, what: str, **asked: Any) -> Iterator[Any]:
        """Yield the pages of a listing; raise a MirrorError if there are too many."""
        for number, page in enumerate(self._client.get_paginator(what).paginate(**asked)):
            if number == _MOST_PAGES:
                raise MirrorError(
                    f"S3 lists more than {_MOST_PAGES:,} pages of names: choose a prefix with "
                    "fewer objects, and pack small files into archives"
                )
            yield page

    def find(self, name: str) -> Object | None:
        """Return the object with a name, or None if it does not exist."""
        try:
            with _one_line(name):
                found = self._client.head_object(**self._at(name))
        except _MissingError:
            return None
        return Object(name, found["ContentLength"], found["ETag"])

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return the bytes of a small object, or None if it does not exist.

        Raise a ChangedError if the object is larger.
        """
        try:
            with _one_line(name):
                body = self._client.get_object(**self._at(name))["Body"]
                data: bytes = body.read(most_bytes + 1)
        except _MissingError:
            return None
        if len(data) > most_bytes:
            raise ChangedError(f"{self.place}/{name} is larger than {most_bytes >> 20} MiB")
        return data

    def read_part(self, name: str, start: int, length: int, etag: str) -> bytes:
        """Return bytes of an object that still has this ETag."""
        asked = {"Range": f"bytes={start}-{start + length - 1}", "IfMatch": etag}
        with _one_line(name):
            return b"".join(self._chunks(name, length, **asked))

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        sha256 = hashlib.sha256(data)
        with _one_line(name):
            self._client.put_object(
                **self._at(name),
                Body=data,
                ChecksumSHA256=_in_base64(sha256),
                Metadata={"sha256": sha256.hexdigest()},
            )

    def send(self, path: Path, name: str, sha256: str) -> int:
        """Send a file unless it is already there; return how many bytes were sent.

        Raise a ChangedError if the file does not have this checksum.
        """
        size = path.stat().st_size
        if self.size_and_sha256(name) == (size, sha256):
            return 0
        with path.open("rb") as file:
            if size > _PART:
                return self._send_parts(file.fileno(), path, name, sha256, size)
            data = file.read(_PART + 1)
            _forget(file.fileno(), 0, len(data))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ChangedError(f"{path}: its sha256 has changed")
        self.pace.take(len(data))
        self.write(name, data)
        self.moved += len(data)
        return len(data)

    def fetch(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Write an object to a file, durably; raise a ChangedError if it is another."""
        found = hashlib.sha256()
        with _one_line(name), files.naming(path), path.open("wb") as file:
            for chunk in self._chunks(name, size):
                found.update(chunk)
                file.write(chunk)
                self.moved += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        if (path.stat().st_size, found.hexdigest()) != (size, sha256):
            raise ChangedError(f"{self.place}/{name}: its sha256 does not match")

    def _chunks(self, name: str, size: int, **asked: Any) -> Iterator[bytes]:
        """Yield an object's bytes; raise a ChangedError if there are more than `size`."""
        for chunk in self._client.get_object(**self._at(name), **asked)["Body"].iter_chunks(_CHUNK):
            size -= len(chunk)
            if size < 0:  # an answer without a length may never end
                raise ChangedError(f"{self.place}/{name}: S3 sends more bytes than it listed")
            yield chunk

    def fetch_rest(self, wanted: Object, path: Path) -> bool:
        """Append the rest of an object to a file, durably; return whether a checksum confirms it.

        Raise a ChangedError if the object has changed, or if the file has other bytes.
        """
        have = path.stat().st_size if path.exists() else 0
        if have < wanted.bytes or not path.exists():
            asked = {"IfMatch": wanted.etag} | ({"Range": f"bytes={have}-"} if have else {})
            with _one_line(wanted.name), files.naming(path), path.open("ab") as file:
                for chunk in self._chunks(wanted.name, wanted.bytes - have, **asked):
                    file.write(chunk)
                    self.moved += len(chunk)
                    self.on_move()
                file.flush()
                os.fsync(file.fileno())
        right = path.stat().st_size == wanted.bytes and self._is_as_uploaded(wanted, path)
        if right is False:
            raise ChangedError(f"{self.place}/{wanted.name}: its checksum does not match")
        return bool(right)

    def _is_as_uploaded(self, wanted: Object, path: Path) -> bool | None:
        """Check a file against S3's data about its object; None if it has no computable checksum.

        An ETag is the MD5, or for an upload in parts that of the parts' MD5s, unless it was
        encrypted with a key (docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html).
        """
        digest, _, parts = wanted.etag.strip('"').partition("-")
        with _one_line(wanted.name):
            told = self._client.head_object(**self._at(wanted.name), ChecksumMode="ENABLED")
            own_key = told.get("ServerSideEncryption", "AES256") != "AES256"
            if own_key or told.get("SSECustomerAlgorithm") or not re.fullmatch(_MD5, digest):
                return _has_checksum(path, told)
            of_part = wanted.bytes
            if parts:
                first = self._client.head_object(**self._at(wanted.name), PartNumber=1)
                of_part = first["ContentLength"]
        if parts and (not of_part or -(-wanted.bytes // of_part) != int(parts)):
            return _has_checksum(path, told)
        return _md5s(path, of_part, in_parts=bool(parts)) == digest

    def all_names(self, prefix: str) -> set[str]:
        """Return the names that begin with a prefix, including those of unfinished uploads."""
        with _one_line(prefix):
            begun = {upload["Key"][len(self._top) :] for upload in self._uploads(prefix)}
        return {*self.names(prefix), *begun}

    def remove(self, prefix: str, keep: Container[str] = ()) -> None:
        """Remove everything that all_names returns, except the names to keep."""
        with _one_line(prefix):
            for upload in self._uploads(prefix):
                if upload["Key"][len(self._top) :] not in keep:
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        for name in [name for name in self.names(prefix) if name not in keep]:
            with _one_line(name):
                self._client.delete_object(**self._at(name))

    def together(self, work: Callable[[Any], object], items: Sequence[Any]) -> None:
        """Process all items, a few at a time; raise the first error."""
        for future in [self._pool.submit(work, item) for item in items]:
            future.result()

    def _send_parts(self, file: int, path: Path, name: str, sha256: str, size: int) -> int:
        with _one_line(name):
            upload, there = self._pending(name) or self._begin(name, sha256)
        of_part = max(_PART, -(-size // _MOST_PARTS))
        whole, sent, parts = hashlib.sha256(), 0, []
        free = threading.Semaphore(_AT_ONCE)
        futures: list[Future[dict[str, Any]]] = []
        failed = threading.Event()
        for number, start in enumerate(range(0, size, of_part), 1):
            free.acquire()
            if failed.is_set():
                break
            data = os.pread(file, of_part, start)
            _forget(file, start, len(data))
            whole.update(data)
            part = _Part(number, data)
            if known := part.as_listed(there.get(number)):
                free.release()
                parts.append(known)
                continue
            self.pace.take(len(data))
            self.on_move()
            sent += len(data)
            futures.append(
                self._pool.submit(self._send_part, name, upload, part, free=free, failed=failed)
            )
        parts += [future.result() for future in futures]  # or the first error
        if whole.hexdigest() != sha256:
            with _one_line(name):
                self._client.abort_multipart_upload(**self._at(name), UploadId=upload)
            raise ChangedError(f"{path}: its sha256 has changed")
        every = {"Parts": sorted(parts, key=lambda part: int(part["PartNumber"]))}
        with _one_line(name):
            self._client.complete_multipart_upload(
                **self._at(name), UploadId=upload, MultipartUpload=every
            )
        if self.size_and_sha256(name) != (size, sha256):  # an upload with other bytes was continued
            self.remove(name)
            raise MirrorError(f"{self.place}/{name}: another upload has replaced it")
        return sent

    def _begin(self, name: str, sha256: str) -> tuple[str, dict[int, Any]]:
        begun = self._client.create_multipart_upload(
            **self._at(name), ChecksumAlgorithm="SHA256", Metadata={"sha256": sha256}
        )
        return begun["UploadId"], {}

    def _pending(self, name: str) -> tuple[str, dict[int, Any]] | None:
        """Return an interrupted upload of this object, and its parts by number."""
        for upload in self._uploads(name):
            if upload["Key"] == self._at(name)["Key"]:
                pages = self._pages("list_parts", **self._at(name), UploadId=upload["UploadId"])
                parts = [part for page in pages for part in page.get("Parts", ())]
                return upload["UploadId"], {part["PartNumber"]: part for part in parts}
        return None

    def _uploads(self, prefix: str) -> list[Any]:
        pages = self._pages(
            "list_multipart_uploads", Bucket=self._bucket, Prefix=self._at(prefix)["Key"]
        )
        return [upload for page in pages for upload in page.get("Uploads", ())]

    def _send_part(
        self,
        name: str,
        upload: str,
        part: _Part,
        *,
        free: threading.Semaphore,
        failed: threading.Event,
    ) -> dict[str, Any]:
        try:
            with _one_line(name):
                answer = self._client.upload_part(
                    **self._at(name),
                    UploadId=upload,
                    PartNumber=part.number,
                    Body=part.data,
                    ChecksumSHA256=part.sha256,
                )
        except BaseException:
            failed.set()
            raise
        finally:
            free.release()
        self.moved += len(part.data)
        return part.named(answer["ETag"])

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._top + name}


class _Part:
    """A part of a file."""

    def __init__(self, number: int, data: bytes) -> None:
        self.number, self.data = number, data
        self.sha256 = _in_base64(hashlib.sha256(data))

    def as_listed(self, there: Any) -> dict[str, Any] | None:
        """Return the part's name if S3 has it, by its checksum, or by its MD5 if none is listed.

        An ETag is the MD5, unless the bucket encrypts with a KMS key.
        """
        if not there or there["Size"] != len(self.data):
            return None
        listed = there.get("ChecksumSHA256")
        md5 = f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'
        same = listed == self.sha256 if listed else there["ETag"] == md5
        return self.named(there["ETag"]) if same else None

    def named(self, etag: str) -> dict[str, Any]:
        """Return how the completed upload refers to this part."""
        return {"PartNumber": self.number, "ETag": etag, "ChecksumSHA256": self.sha256}


class Bandwidth:
    """Limits the bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until this many bytes can be sent."""
        now = time.monotonic()
        time.sleep(max(0.0, self._free_at - now))
        self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s


class _MissingError(MirrorError):
    """There is no such object."""


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        found = files.sha256_of(file)
        _forget(file.fileno(), 0, 0)
    return found


def _client(connections: int) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MirrorError(
            f"this Python environment has no boto3, which S3 requires: run {INSTALL}"
        ) from None
    with _one_line(""):
        return boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_ANSWER_S,
                max_pool_connections=connections,
                retries={"mode": "standard", "total_max_attempts": _TRIES},
            ),
        )


def _md5s(path: Path, of_part: int, *, in_parts: bool) -> str:
    """Return a file's MD5, or the MD5 of the MD5s of its parts."""
    found: list[Any] = []
    with path.open("rb") as file:
        while not found or file.tell() < path.stat().st_size:
            found.append(hashlib.md5(usedforsecurity=False))
            left = of_part
            while left and (data := file.read(min(left, _CHUNK))):
                found[-1].update(data)
                left -= len(data)
    if not in_parts:
        return str(found[0].hexdigest())
    joined = b"".join(each.digest() for each in found)
    return hashlib.md5(joined, usedforsecurity=False).hexdigest()


def _has_checksum(path: Path, told: Mapping[str, Any]) -> bool | None:
    """Check a file by the complete object's SHA-256 or CRC-32, or return None if S3 has neither."""
    if told.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    if sha256 := told.get("ChecksumSHA256"):
        return base64.b64decode(sha256).hex() == sha256_of(path)
    if crc := told.get("ChecksumCRC32"):
        found = 0
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                found = zlib.crc32(data, found)
        return base64.b64decode(crc) == found.to_bytes(4, "big")
    return None


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn botocore's errors into one-line errors."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        said = error.response.get("Error", {})
        code, words = str(said.get("Code", "")), str(said.get("Message", ""))
        if code in _MISSING:
            raise _MissingError(f"S3 has no {name}") from None
        raise MirrorError(_short(f"{error.operation_name}: {code}: {words}")) from None
    except BotoCoreError as error:  # with a server's address, without the full request
        words = re.sub(r"(https?://[^/\s\"]+)[^\s\"]*", r"\1", str(error))
        raise MirrorError(_short(words)) from None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line.rstrip(".") if len(line) <= 300 else f"{line[:299]}…"


def _in_base64(sha256: Any) -> str:
    return base64.b64encode(sha256.digest()).decode()


def _forget(file: int, start: int, length: int) -> None:
    """Leave the page cache to the training job."""
    os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)
