"""A webhook on loopback that answers as the test says, and keeps what it was sent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "services/T0/B0/s3cr3t"


class Webhook:
    """The server. Its answers are used in turn, the last of them again: codes, or what it does."""

    def __init__(self, answers: Sequence[int | str]) -> None:
        self.answers = [*answers]
        self.got: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.released = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.paths.append(self.path)
                length = int(self.headers["Content-Length"])
                owner.got.append(json.loads(self.rfile.read(length)))
                number = min(len(owner.got), len(owner.answers)) - 1
                with suppress(OSError):  # whoever asked may be gone
                    owner.answer(self, owner.answers[number])

            do_GET = do_POST  # noqa: N815  what becomes of a redirect that is followed

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}/{SECRET}"

    def answer(self, handler: BaseHTTPRequestHandler, answer: int | str) -> None:
        if answer == "hang":
            self.released.wait(600)
        elif answer == "close":
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif answer == "endless header":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
            while not self.released.is_set():
                handler.wfile.write(b"x" * 4096)
        elif answer == "drip":  # each byte is in time, all of them are not
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.released.wait(0.05):
                handler.wfile.write(b"x")
        elif answer == "endless body":
            handler.send_response(200)
            handler.end_headers()
            while not self.released.is_set():
                handler.wfile.write(b"x" * 4096)
        elif isinstance(answer, int):
            handler.send_response(answer)
            if 300 <= answer < 400:
                handler.send_header("Location", f"http://localhost:{self.address[10:]}/elsewhere")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            raise AssertionError(answer)

    def file(self, path: Path) -> Path:
        """Write its URL into a private file."""
        path.touch(mode=0o600)
        path.write_text(f"{self.url}\n")
        return path

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(*answers: int | str) -> Iterator[Webhook]:
    """Return a webhook while the block runs."""
    webhook = Webhook(answers or [200])
    try:
        yield webhook
    finally:
        webhook.close()
