"""SeaweedFS's server of S3's protocol on this machine, and a gate before it that has faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ..free_port import free_port
from ..waiting import eventually

BUCKET = "checkpoints-of-tests"
_KEY = "only-for-tests"
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
_OPTIONS = (
    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.iam=false", "-s3.autoCreateBucket=false"),
    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-volume.max=20"),
    *("-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0", "-volume.minFreeSpace=0"),
)


class Server:
    """The server; users `writer`, and `reader`, who may not write."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory, self._ports = directory, {name: free_port() for name in _PORTS}
        users = {"writer": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}
        identities = [
            {"name": n, "credentials": [{"accessKey": n, "secretKey": _KEY}], "actions": actions}
            for n, actions in users.items()
        ]
        (directory / "users.json").write_text(json.dumps({"identities": identities}))
        self._process: subprocess.Popen[bytes] | None = None
        self.gate = Gate(self._ports["s3.port"])
        self.start()

    def start(self) -> None:
        """Start it, again with what it had, and wait until it answers."""
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        where = [f"-dir={self._directory}", f"-s3.config={self._directory / 'users.json'}"]
        weed = Path(sys.executable).with_name("weed")
        log = self._directory / "log"
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [weed, "-logtostderr=true", "server", *ports, *where, *_OPTIONS],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                env=os.environ | {"GOMAXPROCS": "2"},
            )  # fmt: skip
        client = self.client(past_gate=True)

        def answers() -> bool:
            try:
                client.create_bucket(Bucket=BUCKET)
            except ClientError as error:
                return error.response["Error"]["Code"].startswith("BucketAlready")
            except BotoCoreError:
                return False
            return True

        eventually(answers, said=lambda: log.read_text()[-4000:])

    def kill(self) -> None:
        """Kill it, with all connections."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, *, past_gate: bool = False) -> Any:
        """Return boto3's client, as a writer."""
        import boto3
        from botocore.config import Config

        port = self._ports["s3.port"] if past_gate else self.gate.port
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=60, read_timeout=60)
        return boto3.session.Session("writer", _KEY, region_name="us-east-1").client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", config=config
        )

    def sizes(self) -> dict[str, int]:
        """Return every object of the bucket by its key."""
        listed = self.client(past_gate=True).list_objects_v2(Bucket=BUCKET)
        return {each["Key"]: each["Size"] for each in listed.get("Contents", ())}

    def parts(self) -> int:
        """Return how many parts have arrived of files that are not whole."""
        client, number = self.client(past_gate=True), 0
        for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
            named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            number += len(client.list_parts(Bucket=BUCKET, **named).get("Parts", ()))
        return number

    def be(self, user: str, home: Path) -> None:
        """Write boto3's own files for a user of the server into a home."""
        aws = home / ".aws"
        aws.mkdir(exist_ok=True)
        keys = f"aws_access_key_id = {user}\naws_secret_access_key = {_KEY}\n"
        (aws / "credentials").write_text(f"[default]\n{keys}")
        url = f"http://127.0.0.1:{self.gate.port}"
        (aws / "config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {url}\n")


class Gate:
    """Passes connections on to a port, each byte as it is, unless a test gives it a fault."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.received = 0
        """The bytes that clients have sent."""
        self.sent = 0
        """The bytes that it has sent to them."""
        self.bytes_per_s: float | None = None
        self.sends_bytes_per_s: float | None = None
        self.refuses = False
        """Whether each connection is closed at once, as by a dead server."""
        self.answers: list[int] = []
        """After how many bytes of an answer each of the next connections is closed."""
        self.open: list[socket.socket] = []
        """The connections."""
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """End all faults."""
        self.bytes_per_s = self.sends_bytes_per_s = None
        self.refuses = False
        self.answers = []

    def cut(self) -> None:
        """Be a dead server from now on."""
        self.refuses = True
        for each in self.open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        if self.refuses:
            near.close()
            return
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._behind)) as far:
            threading.Thread(target=self._pass, args=(far, near), daemon=True).start()
            self.open.append(near)
            self._pass(near, far, counts=True)
            self.open.remove(near)

    def _pass(self, source: socket.socket, target: socket.socket, *, counts: bool = False) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                rate = self.bytes_per_s if counts else self.sends_bytes_per_s
                time.sleep(len(data) / rate if rate else 0)
                if not counts and self.answers:
                    target.sendall(data[: self.answers.pop(0)])
                    break
                target.sendall(data)
                if counts:
                    self.received += len(data)
                else:
                    self.sent += len(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """Run a server in the block."""
    server = Server(directory)
    try:
        yield server
    finally:
        server.gate.close()
        server.kill()
