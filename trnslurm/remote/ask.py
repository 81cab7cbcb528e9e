"""Runs a command on another host, and shows its output as if it ran here.

The command has a token and runs only once. If the connection breaks, the next connection shows the
rest of the output. request.py records a command that changes something until its end is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from trnslurm.errors import ConnectionLostError, RemoteError
from trnslurm.remote import launcher
from trnslurm.remote.receive import (
    BEAT,
    BEGUN,
    CHUNK_BYTES,
    DAMAGED,
    DONE,
    END,
    ERR,
    FILE,
    HEAD_BYTES,
    INTERRUPT,
    LAUNCHER,
    MARK,
    OUT,
    PARCEL,
    REQUEST,
    write_all,
)
from trnslurm.remote.request import RemoteCommand, forget, keep, refuse_again
from trnslurm.remote.ssh import ended

_WAITS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 20.0)
"""The delays before further attempts to connect, as long as they bring nothing new."""
_SILENT_S = 120.0
"""Longer than a login shell takes to start, and longer than the other side is ever silent."""

_MOST_NOISE = 1 << 20
_MOST_BYTES = 1 << 30
"""Limit for a login shell's output and the files that a command writes, which stay in memory."""

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Answer:
    """The state of a request so far."""

    offsets: dict[str, int] = field(default_factory=lambda: {"out": 0, "err": 0})
    sent: dict[str, int] = field(default_factory=dict)
    """The number of bytes of each file that the other side had at its last answer."""
    asked: bool = False
    """Whether everything was sent, so that the command may have begun."""
    begun: bool = False
    code: int = 1
    error: str = ""
    """Why the other host does not know how the command ended."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The files that the command wrote into its working directory."""

    @property
    def progress(self) -> str:
        """Return a string that changes whenever a connection brought something new."""
        return json.dumps([self.offsets, self.sent, self.asked, self.begun])


def ask(
    request: RemoteCommand, *, say: Say, out: BinaryIO | None = None, again: bool = False
) -> Answer:
    """Run a command on the other host to completion, over as many connections as needed.

    Its output goes to our stdout, or to `out`. Ctrl-C is passed on. After a second Ctrl-C, the
    command continues on its own. `again` means that another process sent the command, which may
    have begun.
    """
    answer = Answer(asked=again, begun=request.begun)
    if not request.shows:
        if not again:
            refuse_again(request)
        keep(request)
    interrupts = _Interrupts(answer)
    try:
        with interrupts:
            _run(request, answer, interrupts, say, out)
    except (KeyboardInterrupt, RemoteError) as error:
        if request.shows or not answer.asked:
            forget(request)
            raise
        keep(replace(request, begun=answer.begun), process="")
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        raise ConnectionLostError(_what_is_known(request, answer, why)) from None
    forget(request)
    if answer.error:
        raise RemoteError(f"{request.place.host}: {answer.error}")
    return answer


def _run(
    request: RemoteCommand, answer: Answer, interrupts: _Interrupts, say: Say, out: BinaryIO | None
) -> None:
    """Connect until the command's end is known."""
    tries, reached = 0, False
    while True:
        before = answer.progress
        connection = _Connection(request, answer, interrupts, out)
        try:
            return connection.run()
        except ConnectionLostError as error:
            reached = reached or connection.reached
            # The shared connection may have broken while this machine slept: try once more.
            if not reached and (tries or ": ssh: " in str(error)):
                raise RemoteError(str(error)) from None
            tries = 1 if answer.progress != before else tries + 1
            if tries > len(_WAITS_S):
                raise
            say(f"{error}: reconnecting")
            request.place.forget()
            interrupts.wait(_WAITS_S[tries - 1])


class _Interrupts:
    """Passes the first Ctrl-C to the command once it has begun. Others interrupt this process.

    The first is only recorded, so that it does not interrupt a transfer.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer, self._before = answer, signal.getsignal(signal.SIGINT)
        self.seen = False

    def __enter__(self) -> None:
        self.reader, self._writer = os.pipe()
        if self._before is not signal.SIG_IGN:  # inherited: this process ignores Ctrl-C
            signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        os.close(self.reader)
        os.close(self._writer)

    def _take(self, number: int, frame: object) -> None:
        if self.seen or not self._answer.begun:
            raise KeyboardInterrupt
        self.seen = True
        os.write(self._writer, b"!")

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt. Ctrl-C interrupts this process."""
        if select.select([self.reader], [], [], seconds)[0]:
            raise KeyboardInterrupt


def _what_is_known(request: RemoteCommand, answer: Answer, why: str) -> str:
    if answer.begun:
        return f"{why}: {request.what} continues there. Run `trnslurm reconnect` to see its outcome"
    return (
        f"{why}: it is unknown whether {request.what} has begun. Run `trnslurm reconnect` to find "
        "out. It never runs a command twice"
    )


class _BrokenError(Exception):
    """The connection ended too early."""


class _Connection:
    """One connection, which ends with the command or breaks."""

    def __init__(
        self, request: RemoteCommand, answer: Answer, interrupts: _Interrupts, out: BinaryIO | None
    ) -> None:
        self._request, self._answer, self._out = request, answer, out
        self._interrupts = interrupts
        self._buffer = bytearray()
        self.reached = False
        """Whether the launcher, or the program that receives it, has answered."""

    def run(self) -> None:
        """Connect, and show the command's output to its end, or raise ConnectionLostError."""
        argv = self._request.place.argv(launcher.name())
        # A file, not a pipe: the shared connection may keep it open.
        with tempfile.TemporaryFile() as errors, _started(argv, errors) as process:
            assert process.stdin and process.stdout
            self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
            try:
                noise = self._find_mark()
                if noise is None:
                    self._serve()
                    return
            except _BrokenError:
                noise = b""
            except ConnectionLostError:
                raise
            except BaseException:  # the output is no longer read, as after `head`
                if self._request.shows and self._answer.begun:
                    with contextlib.suppress(_BrokenError):
                        self._write(INTERRUPT)
                raise
            process.stdin.close()
            code = process.wait(_SILENT_S)
            errors.seek(0)
            raise ended(
                self._request.place,
                code,
                errors.read().decode(errors="replace"),
                noise,
                reached=self.reached,
            )

    def _find_mark(self) -> bytes | None:
        """Skip the output of a login shell. Return that output if nothing else arrives."""
        while MARK not in self._buffer:
            if not (data := self._read()):
                return bytes(self._buffer)
            self._buffer += data
            if len(self._buffer) > _MOST_NOISE:
                raise self._something_else()
        self._buffer = self._buffer.partition(MARK)[2]
        self.reached = True
        return None

    def _serve(self) -> None:
        request, answer = self._request, self._answer
        while True:
            kind, data = self._frame()
            if kind in (LAUNCHER, PARCEL):
                whole = launcher.archive() if kind == LAUNCHER else request.parcel or b""
                if not data.isdigit():
                    raise self._something_else(kind + data)
                answer.sent[kind.decode()] = int(data)
                self._send_file(whole, int(data))
                answer.asked = answer.asked or kind == PARCEL
            elif kind == REQUEST:
                facts = {
                    "token": request.token,
                    "argv": list(request.argv),
                    "shows": request.shows,
                    "site": dict(request.site),
                    "cluster": request.cluster,
                    "parcel": request.parcel is not None,
                    "begun": answer.begun,
                    **answer.offsets,
                }
                self._write(json.dumps(facts).encode() + b"\n")
                answer.asked = answer.asked or request.parcel is None
            elif kind == BEGUN:
                if not (answer.begun or request.shows):
                    keep(replace(request, begun=True))
                answer.begun = True
                if self._interrupts.seen:  # send it again: it may not have arrived
                    self._write(INTERRUPT)
            elif kind in (OUT, ERR):
                self._show(kind, data)
            elif kind == FILE:
                name, _, content = data.partition(b"\n")
                answer.files[Path(name.decode(errors="replace")).name] = content
                if sum(map(len, answer.files.values())) > _MOST_BYTES:
                    raise self._something_else(kind + name)
            elif kind == DAMAGED:
                raise self._lost("the files were damaged in transit")
            elif kind == END:
                self._end(data)
                return
            elif kind != BEAT:
                raise self._something_else(kind + data)

    def _end(self, data: bytes) -> None:
        try:
            facts = json.loads(data)
            self._answer.code = int(facts.get("code", 1))
            self._answer.error = str(facts.get("error", ""))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise self._something_else(END + data) from None
        with contextlib.suppress(_BrokenError):
            self._write(DONE)

    def _show(self, kind: bytes, data: bytes) -> None:
        name = "out" if kind == OUT else "err"
        stream = sys.stdout.buffer if kind == OUT else sys.stderr.buffer
        if kind == OUT and self._out is not None:
            stream = self._out
        self._answer.offsets[name] += len(data)
        stream.write(data)
        stream.flush()

    def _send_file(self, data: bytes, offset: int) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        self._write(f"{len(data)} {sha256}\n".encode())
        self._write(data[offset if offset <= len(data) else 0 :])

    def _frame(self) -> tuple[bytes, bytes]:
        """Return the next complete frame. An incomplete frame is dropped."""
        while len(self._buffer) < HEAD_BYTES or len(self._buffer) < HEAD_BYTES + self._length():
            if not (data := self._read()):
                raise _BrokenError
            self._buffer += data
        size = HEAD_BYTES + self._length()
        whole = bytes(self._buffer[:size])
        del self._buffer[:size]
        return whole[:1], whole[HEAD_BYTES:]

    def _length(self) -> int:
        digits = self._buffer[1:HEAD_BYTES]
        if not digits.isdigit():  # int() also takes signs and spaces
            raise self._something_else()
        return int(digits)

    def _something_else(self, data: bytes = b"") -> RemoteError:
        return RemoteError(
            f"{self._request.place.host}: the answer is not from trnslurm's launcher: "
            f"{bytes((data or self._buffer)[:40])!r}"
        )

    def _read(self) -> bytes:
        # A person may have to type a password first.
        limit = None if sys.stdin.isatty() and not self.reached else _SILENT_S
        while True:
            ready, _, _ = select.select([self._stdout, self._interrupts.reader], [], [], limit)
            if not ready:
                raise self._lost(f"no answer within {_SILENT_S:g} s")
            if self._stdout in ready:
                return os.read(self._stdout, CHUNK_BYTES)
            os.read(self._interrupts.reader, 1)
            self._write(INTERRUPT)

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._stdin, data)
        except BrokenPipeError:
            raise _BrokenError from None

    def _lost(self, why: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._request.place.host}: {why}")


@contextlib.contextmanager
def _started(argv: Sequence[str], errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run ssh with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    except OSError as error:
        raise RemoteError(f"{argv[0]}: {error.strerror}: --on requires OpenSSH") from None
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
