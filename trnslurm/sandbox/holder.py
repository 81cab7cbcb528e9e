"""The first process of a sandbox, which builds the sandbox and obeys orders until it ends.

The process runs in new pid, network, mount and host name namespaces (for an ordinary user, also in
a user namespace), so every process, link and mount of the sandbox ends with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from trnslurm.errors import SandboxError, TrnslurmError
from trnslurm.sandbox.boot import BootedCluster
from trnslurm.sandbox.daemons import watch_children
from trnslurm.sandbox.layout import Layout, replace_text

_LOOK_S = 1


def main() -> None:
    """Run as `python -m trnslurm.sandbox.holder DIRECTORY INODE [OWNER_PIDFD]`, in namespaces."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(
            number, signal.SIG_DFL
        )  # otherwise jobs inherit what `nohup trnslurm sandbox up` set
    layout = Layout(Path(sys.argv[1]))
    owner = int(sys.argv[3]) if len(sys.argv) > 3 else None
    # The lock shows that the sandbox is alive. A process that only checks holds it for a moment.
    lock = os.open(layout.path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fstat(lock).st_ino != int(sys.argv[2]):
        sys.exit(1)  # the `up` that started this process was stopped and has cleaned up
    pid = Path("/proc/self").readlink()  # as seen from outside: /proc is not mounted yet
    cluster = BootedCluster(layout)
    try:
        cluster.boot()
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(layout.socket))
        server.listen()
        # From here on, the sandbox is up.
        replace_text(layout.entry, f"{pid} {Path('/proc/self/ns/net').readlink()}\n")
    except (TrnslurmError, OSError) as error:
        replace_text(layout.failure, f"{' '.join(str(error).split())}\n")
        sys.exit(1)
    _serve(cluster, layout, server, owner, lock)


def _serve(
    cluster: BootedCluster, layout: Layout, server: socket.socket, owner: int | None, lock: int
) -> None:
    """Obey orders until the directory, or the process that owns the sandbox, is gone."""
    wake = watch_children()
    watched: list[Any] = [server, wake] + ([owner] if owner is not None else [])
    cluster.reap()
    while True:
        ready, _, _ = select.select(watched, [], [], _LOOK_S)
        if not _still_there(layout, lock):
            return
        if owner in ready:
            cluster.end()
            return
        if wake in ready:
            os.read(wake, 4096)
            cluster.reap()
        if server in ready:
            _answer(cluster, server)


def _still_there(layout: Layout, lock: int) -> bool:
    try:
        return layout.path.stat().st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        return False


def _answer(cluster: BootedCluster, server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.settimeout(5)
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        try:
            order: dict[str, Any] = json.loads(stream.readline())
            answer = {"ok": cluster.obey(order)}
        except (SandboxError, ValueError, OSError) as error:
            answer = {"error": " ".join(str(error).split())}
        try:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
        except OSError:
            pass  # the client has gone


if __name__ == "__main__":
    main()
