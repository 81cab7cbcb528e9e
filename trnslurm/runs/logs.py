"""Finds a run's log files, and prints or follows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trnslurm.contract.files import open_file
from trnslurm.contract.roles import read_roles
from trnslurm.errors import RunError
from trnslurm.records.run import RunDir
from trnslurm.runs.status import run_status

_POLL_S = 0.5
_CHUNK_BYTES = 1 << 16


def choose_log(
    run: RunDir,
    *,
    phase: str | None = None,
    node: int = 0,
    batch: bool = False,
    role: str | None = None,
) -> Path | None:
    """Return the newest log of a node, of the batch script, or of a role's server `node`.

    Return None if there is none.
    """
    if role is not None:
        return _log_of_server(run, role, node)
    phases, record = run.phases_back(phase), run.record()
    if not 0 <= node < record.nodes:
        raise RunError(f"{run.name} has no node {node}, only nodes 0 to {record.nodes - 1}")
    for name in phases:
        if batch:
            if logs := run.batch_logs(name):
                return logs[-1]
            continue
        for attempt in reversed(run.attempts(name)):
            file = run.node_log(name, attempt.attempt, node)
            if file.exists():
                return file
    return None


def _log_of_server(run: RunDir, role: str, number: int) -> Path | None:
    """Return the newest log of a server, or None if there is none."""
    roles = {each.name: each for each in read_roles(run.roles_file)}
    if role not in roles:
        known = f"it has {', '.join(roles)}" if roles else "it has none"
        raise RunError(f"{run.name} has no role {role}: {known}")
    if not 0 <= number < (nodes := roles[role].nodes):
        raise RunError(
            f"role {role} of {run.name} has no server {number}, only servers 0 to {nodes - 1}"
        )
    found = run.server_logs(role, number)
    return found[-1] if found else None


def log_of(run: RunDir, **which: Any) -> Path:
    """Return the log that choose_log finds. Raise a RunError if there is none yet."""
    if file := choose_log(run, **which):
        return file
    status = run_status(run)
    reason = f": {status.reason}" if status.reason else ""
    raise RunError(f"{run.name} has no such log yet: it is {status.state}{reason}")


def tail_offset(file: Path, lines: int | None) -> int:
    """Return the offset at which the last `lines` of a file start. None means all lines."""
    if lines is None:
        return 0
    with open_file(file) as stream:
        end = stream.seek(0, 2)
        window = _CHUNK_BYTES
        while True:
            start = max(0, end - window)
            stream.seek(start)
            # Without the newline that ends the last line, each newline starts one more line.
            data = stream.read(end - start).removesuffix(b"\n")
            last = data.split(b"\n")[-lines:]
            if len(last) == lines and len(b"\n".join(last)) < len(data):
                return start + len(data) - len(b"\n".join(last))
            if start == 0:
                return 0
            window *= 4


def print_log(file: Path, lines: int | None) -> Iterator[bytes]:
    """Yield the last `lines` of a log. None means all lines."""
    yield from _rest(file, tail_offset(file, lines))


def last_states(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a log as a terminal shows it, where a progress bar keeps rewriting one line."""
    held = b""
    for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        if lines:
            yield b"".join(_last_state(line) + b"\n" for line in lines)
        if len(held) > _CHUNK_BYTES:
            before, again, newest = held.rpartition(b"\r")
            held = _last_state(before) + again + newest if again else b""
            if not again:
                yield newest
    yield _last_state(held)


def _last_state(line: bytes) -> bytes:
    """Return the last text written over a line. Blanks only clear the line."""
    states = (state for state in reversed(line.split(b"\r")) if state.strip())
    return next(states, b"") if b"\r" in line else line


def follow_log(
    choose: Callable[[], Path | None], ended: Callable[[], bool], *, lines: int | None
) -> Iterator[bytes]:
    """Yield a log's last lines and whatever is added, across newer attempts, until the run ends."""
    current: Path | None = None
    offset = 0
    while True:
        over = ended()  # before reading, so that nothing written in between is lost
        newest = choose()
        if newest is not None and newest != current:
            if current is not None:
                yield from _rest(current, offset)
                yield f"==> {newest.name} <==\n".encode()
            offset = tail_offset(newest, lines) if current is None else 0
            current = newest
        if current is not None:
            if current.stat().st_size < offset:
                offset = 0  # the file was truncated: start again
            for chunk in _rest(current, offset):
                offset += len(chunk)
                yield chunk
        if over:
            return
        time.sleep(_POLL_S)


def _rest(file: Path, offset: int) -> Iterator[bytes]:
    with open_file(file) as stream:
        stream.seek(offset)
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
