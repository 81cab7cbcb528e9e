"""Finds out from TCP sockets whether processes may be connected to other workers.

PyTorch's store, Gloo, NCCL, MPI, Ray and Dask either listen for the others or are connected to
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Socket states in /proc/net/tcp, from Linux's include/net/tcp_states.h.
_ESTABLISHED, _LISTEN = "01", "0A"
_WEB = {80, 443}
"""The ports of the Hub, S3 and trackers, on which no worker listens."""
_TRACKER = "wandb"
"""How the names of the processes start that Weights & Biases launches next to a worker."""


class _Socket(NamedTuple):
    """A line of /proc/net/tcp, as proc_pid_net(5) describes it."""

    local_port: int
    remote_port: int
    state: str
    inode: str


def are_there(pids: Iterable[int]) -> bool:
    """Check whether these processes listen, or have connections besides those to the web."""
    workers: set[str] = set()
    tracker: set[str] = set()
    for pid in pids:
        is_tracker = _text(Path(f"/proc/{pid}/comm")).startswith(_TRACKER)
        (tracker if is_tracker else workers).update(_inodes(pid))
    sockets = [*_sockets("tcp"), *_sockets("tcp6")]
    listens = {s.local_port for s in sockets if s.inode in tracker and s.state == _LISTEN}
    ignored = _WEB | listens
    return any(
        s.state == _LISTEN or (s.state == _ESTABLISHED and s.remote_port not in ignored)
        for s in sockets
        if s.inode in workers
    )


def _inodes(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    links: list[str] = []
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                links.append(os.readlink(entry.path))  # noqa: PTH115 (it is no path)
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _sockets(table: str) -> Iterable[_Socket]:
    for line in _text(Path(f"/proc/self/net/{table}")).splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        yield _Socket(local, remote, fields[3], fields[9])


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""
