"""Receives files over a connection that may break. The first of our code on the other host.

If the launcher is missing there, this source is sent as text, so it needs only the standard
library.

What one side says to the other is a frame: a letter, the length in eight digits, and the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import tarfile
from pathlib import Path

MARK = b"\x1dtrnslurm\n"
"""Marks the first frame. Anything before it was printed by a login shell."""
HEAD_BYTES = 9
CHUNK_BYTES = 1 << 15
LAUNCHER, REQUEST, PARCEL, DAMAGED = b"l", b"q", b"p", b"d"
BEGUN, OUT, ERR, FILE, BEAT, END = b"b", b"o", b"e", b"f", b".", b"x"
INTERRUPT, DONE = b"I", b"D"
"""Sent in the other direction once a command has begun."""


def frame(kind: bytes, data: bytes = b"") -> bytes:
    """Return a frame."""
    return kind + b"%08d" % len(data) + data


def send(kind: bytes, data: bytes = b"") -> None:
    """Write a frame to stdout."""
    write_all(1, frame(kind, data))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data, because a pipe may accept less at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_line() -> bytes:
    """Read a line from stdin, and nothing after it. Exit if the connection ends."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


def receive(file: Path, kind: bytes) -> None:
    """Request the part of a file that earlier connections did not deliver.

    The answer is a line with size and sha256, then the bytes from the requested offset. Each
    connection writes its own part file, because a broken connection may still deliver bytes.
    """
    parts = [*file.parent.glob(f"{file.name}.part-*")]
    own = file.with_name(f"{file.name}.part-{socket.gethostname()}-{os.getpid()}")
    offset = 0
    with contextlib.suppress(OSError, ValueError):
        shutil.copyfile(max(parts, key=lambda part: part.stat().st_size), own)
        offset = own.stat().st_size
    send(kind, b"%d" % offset)
    size, sha256 = read_line().split()
    with own.open("ab", buffering=0) as stream:
        if offset > int(size):
            offset = 0
        stream.truncate(offset)
        while offset < int(size):
            data = os.read(0, min(CHUNK_BYTES, int(size) - offset))
            if not data:
                sys.exit(0)
            write_all(stream.fileno(), data)
            offset += len(data)
    try:
        whole = hashlib.sha256(own.read_bytes()).hexdigest().encode() == sha256
    except FileNotFoundError:  # removed by another connection, which finished first
        return
    if whole:
        own.replace(file)
    for part in (*parts, own):
        part.unlink(missing_ok=True)
    if not whole:
        send(DAMAGED)
        sys.exit(1)


def extract(tar: tarfile.TarFile, directory: Path) -> None:
    """Unpack an archive into a directory. Reject paths outside it."""
    if hasattr(tarfile, "data_filter"):  # since 3.11.4
        tar.extraction_filter = staticmethod(tarfile.data_filter)
    for member in tar.getmembers():
        inside = not member.name.startswith("/") and ".." not in Path(member.name).parts
        if not inside or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} does not belong in this archive")
    tar.extractall(directory)


def install(directory: Path) -> None:
    """Receive the launcher and unpack it. Several processes may do so at the same time."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive = directory.with_name(f"{directory.name}.tar.gz")
    receive(archive, LAUNCHER)
    new = directory.with_name(f"{directory.name}.new-{socket.gethostname()}-{os.getpid()}")
    with tarfile.open(archive) as tar:
        extract(tar, new)
    try:
        new.rename(directory)
    except OSError:
        shutil.rmtree(new)
    archive.unlink(missing_ok=True)


def main(directory: str) -> None:
    """Receive the launcher, and then become it."""
    write_all(1, MARK)
    try:
        install(Path(directory))
    except OSError as error:
        text = f"{error.filename or directory}: {error.strerror}"
        send(END, json.dumps({"error": text}).encode())
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-X", "utf8", "-I", directory, "installed"])


if __name__ == "__main__":
    main(sys.argv[1])
