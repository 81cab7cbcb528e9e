"""Downloads a file over HTTP, resumes where it was cut off, and checks the complete file."""

import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.files import read_json, replacing
from trnslurm.prepare.progress import Progress

TIMEOUT_S = 60
_BLOCK = 1 << 20
_NO_PART = (http.client.PRECONDITION_FAILED, http.client.REQUESTED_RANGE_NOT_SATISFIABLE)


@dataclass(frozen=True, kw_only=True)
class Version:
    """What the server says about its current version of the file."""

    url: str
    etag: str
    """Empty if the server has none that identifies the file byte for byte."""
    bytes: int
    md5: str | None


def file_name(url: str) -> str:
    """Return the name of a URL's file."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if name in ("", "..") or not name.isprintable():
        raise PrepareError(f"{url} does not end in a file name")
    return name


def download(url: str, directory: Path, *, unpacked: bool) -> Path:
    """Fetch a file into a directory, where an earlier run may have left its beginning.

    If the file will be unpacked, there must be room for its contents too.
    """
    path, notes = directory / file_name(url), directory / "download.json"
    version = _read(notes)
    if version is None or version.url != url or _size(path) != version.bytes:
        version = _receive(url, path, notes, version, copies=2 if unpacked else 1)
    _check(path, version)
    return path


def _receive(url: str, path: Path, notes: Path, known: Version | None, *, copies: int) -> Version:
    """Fetch the missing part of the known version if the server still has it, else everything."""
    have = _size(path)
    if known is not None and known.url == url and known.etag and 0 < have < known.bytes:
        only_rest = {"Range": f"bytes={have}-", "If-Range": known.etag}
        with _request(url, have, only_rest) as response:
            if response is not None and response.headers["ETag"] == known.etag:
                _write(response, path, known, have, copies)
                return known
        print(f"{url} has changed or cannot be resumed: starting again", file=sys.stderr)
    with _request(url, 0, {}) as response:
        version = _version(url, response)
        path.unlink(
            missing_ok=True
        )  # before the notes change, or it would pass for a part of the new version
        with replacing(notes) as stream:
            stream.write(json.dumps(asdict(version)).encode())
        _write(response, path, version, 0, copies)
    return version


@contextmanager
def _request(url: str, have: int, headers: dict[str, str]) -> Iterator[Any]:
    """Request the file; yield None if the server does not send only the missing part."""
    request = urllib.request.Request(url, headers={"User-Agent": "trnslurm", **headers})
    # If there is a part to resume from, the error says that finished work is kept.
    failure = KeptError if have else PrepareError
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code in _NO_PART:
            yield None
            return
        hint = "try again later"
        if error.code in (http.client.FORBIDDEN, http.client.NOT_FOUND):
            hint = "the file does not exist or is not public: check the URL"
        said = f"the server answered {error.code} {error.reason}".strip()
        raise failure(f"{url}: {said}: {hint}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise failure(
            f"{url}: the server did not answer "
            f"({getattr(reason, 'strerror', None) or reason or 'cut off'}): "
            "check the network, or fetch the file on a machine with a network and copy it"
        ) from None
    with response:
        yield response if not have or response.status == http.client.PARTIAL_CONTENT else None


def _version(url: str, response: Any) -> Version:
    headers = response.headers
    if not (headers["Content-Length"] or "").isdigit():
        raise PrepareError(f"{url}: the server does not report the size of the file")
    etag = headers["ETag"] or ""
    if etag.startswith("W/"):
        etag = ""
    # On S3 the ETag is the file's MD5, unless it was uploaded in parts or is encrypted with a key.
    match = re.fullmatch(r'"([0-9a-f]{32})"', etag)
    is_keyed = (headers["x-amz-server-side-encryption"] or "").startswith("aws:kms")
    md5 = match[1] if match and not is_keyed else None
    return Version(url=url, etag=etag, bytes=int(headers["Content-Length"]), md5=md5)


def _write(response: Any, path: Path, version: Version, have: int, copies: int) -> None:
    """Append the response to the file."""
    needed, free = copies * version.bytes - have, shutil.disk_usage(path.parent).free
    if free < needed:
        raise KeptError(
            f"{path.parent.parent}: no space for {needed / 1e9:,.1f} GB, only {free / 1e9:,.1f} "
            "GB are "
            "free"
        )
    progress = Progress("fetching", version.bytes, before=have)
    with path.open("ab") as stream:
        while block := _read_block(response):
            stream.write(block)
            have += len(block)
            progress.show(have)
        stream.flush()
        os.fsync(stream.fileno())
    if have < version.bytes:
        raise KeptError(f"{version.url}: cut off after {have:,} of {version.bytes:,} bytes")
    progress.finish()


def _read_block(response: Any) -> bytes:
    """Read a block. A broken connection ends the file, and the caller compares the sizes."""
    try:
        block: bytes = response.read(_BLOCK)
    except http.client.IncompleteRead as error:
        return error.partial
    except (OSError, http.client.HTTPException):
        return b""
    return block


def _check(path: Path, version: Version) -> None:
    """Reject a file whose checksum differs from the server's."""
    if version.md5 is None:
        return
    progress = Progress("checking", version.bytes)
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress.show(done)
    progress.finish()
    if digest.hexdigest() != version.md5:
        raise PrepareError(f"{version.url} was corrupted in transit: fetch it again")


def _read(notes: Path) -> Version | None:
    try:
        return Version(**read_json(notes))
    except TypeError:
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
