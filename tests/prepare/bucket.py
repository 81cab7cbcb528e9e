"""A bucket as S3 shows it over HTTP: parts of a file, ETags, refusals; and connections cut off."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Bucket:
    """The files by path, and how to answer the next requests."""

    files: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    etag: str | None = None
    """Replaces a file's MD5; empty: no ETag."""
    cut_after: int | None = None
    """Close the connection after so many bytes of a body."""
    parts: bool = True
    """Whether requests for parts of a file are answered with parts."""
    refuse_part: int | None = None
    """Answer requests for parts of a file with this status."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of each request."""

    def __enter__(self) -> Bucket:
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket

    def do_GET(self) -> None:
        bucket, wanted = self.bucket, self.headers["Range"]
        bucket.asked.append((self.path, wanted))
        status = bucket.refusals.get(self.path, 200 if self.path in bucket.files else 404)
        if wanted and bucket.refuse_part:
            status = bucket.refuse_part
        if status != 200:
            self._answer(status, b"", {})
            return
        data = bucket.files[self.path]
        etag = f'"{hashlib.md5(data).hexdigest()}"' if bucket.etag is None else bucket.etag
        headers = {"ETag": etag} if etag else {}
        if wanted and bucket.parts and self.headers["If-Range"] in (None, etag):
            first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self._answer(206, data[first:], headers)
        else:
            self._answer(200, data, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: self.bucket.cut_after])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""
