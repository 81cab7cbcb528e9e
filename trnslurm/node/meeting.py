"""The nodes of a job meet on the master port: node 0 listens, and the others connect to it.

The preflight, the checkup and the launcher use this protocol. Messages are lines of JSON. Node 0
sends the meeting's name, so that a node can tell it from another program on the same port. The node
sends its number. Then they exchange the meeting's data, and node 0 sends its answer. The node
closes the connection first, because a lingering connection would occupy node 0's port, which the
workers need next.

To time a link, one side sends a stream of bytes for a second, or 64 MiB. TCP reveals a bad cable
and a throttled or wrong interface. The workers' all-reduce measures EFA.
"""

import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.variables import Variable
from trnslurm.frozen import Frozen

MESSAGE_S = 5.0
"""The time limit for a message that the other side sends at once."""
_RETRY_S = 0.1
_ALIVE_S = 60
_MAX_MESSAGE_BYTES = 2**20
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close resets the connection
_CHUNK = bytes(256 << 10)
_MORE, _END = b"+", b"."
MAX_STREAM_BYTES = 64 << 20
MAX_STREAM_S = 1.0
_SILENT_S = 60.0
"""How long the other side may be silent after a stream, while a slow link drains its buffers."""


class MeetingError(Exception):
    """The reason why nodes cannot meet."""


class Rendezvous(Frozen):
    """The place where an attempt's nodes meet, and this node's number."""

    purpose: str
    node: int
    hosts: tuple[str, ...]
    address: str
    port: int
    run: Path
    phase: str
    attempt: int

    @property
    def name(self) -> str:
        """The meeting's name, which no other meeting has.

        The name does not contain the path of the run directory, because nodes may see different
        paths. It contains a hash of the hosts, because every node sends and receives the name.
        """
        hosts = hashlib.sha256(",".join(self.hosts).encode()).hexdigest()
        return f"{self.purpose} {self.run.name} {self.phase} {self.attempt} {hosts}"


def read_rendezvous(purpose: str) -> Rendezvous:
    """Return the rendezvous that the batch script and srun describe in the environment."""
    environ = os.environ
    return Rendezvous(
        purpose=purpose,
        node=int(environ["SLURM_NODEID"]),
        hosts=tuple(environ[Variable.HOSTS].split(",")),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        run=Path(environ[Variable.RUN_DIR]),
        phase=environ[Variable.PHASE],
        attempt=int(environ[Variable.ATTEMPT]),
    )


class Connection:
    """A connection between node 0 and another node."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def fileno(self) -> int:
        return self._connection.fileno()

    def keep_alive(self) -> None:
        """Keep the silent connection alive in switches and firewalls.

        Security groups of newer EC2 instances forget an idle connection after 350 s:
        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/security-group-connection-tracking.html
        """
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_S)

    def send(self, data: Any) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(data).encode() + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a message; raise a ValueError if the stream ends or contains anything else."""
        self._connection.settimeout(max(0.01, timeout_s))
        line = self._file.readline(_MAX_MESSAGE_BYTES)
        data = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(data, dict):
            raise ValueError("the other side sent no message")
        return data

    def stream(self) -> None:
        """Send bytes for a second, or 64 MiB."""
        self._connection.settimeout(_SILENT_S)
        deadline, sent = time.monotonic() + MAX_STREAM_S, 0
        while sent < MAX_STREAM_BYTES and time.monotonic() < deadline:
            self._connection.sendall(_MORE + _CHUNK)
            sent += len(_CHUNK)
        self._connection.sendall(_END)

    def time_stream(self) -> float:
        """Read the other side's stream; return MB/s."""
        self._connection.settimeout(_SILENT_S)
        start, received = time.monotonic(), 0
        while (mark := self._file.read(1)) == _MORE:
            received += len(self._file.read(len(_CHUNK)))
        if mark != _END:
            raise ValueError("the other side has disconnected")
        return received / 1e6 / max(1e-6, time.monotonic() - start)

    def await_end(self, timeout_s: float) -> None:
        """Wait until the other side closes the connection, and reset it if that takes longer."""
        try:
            self._connection.settimeout(max(0.01, timeout_s))
            if self._file.read(1):
                raise ValueError("the other side sent an extra message")
        except (OSError, ValueError):
            with suppress(OSError):
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._connection.close()


class Meeting:
    """Node 0's side of a meeting.

    `hear` exchanges data with one node until a deadline, and returns the value that `heard` stores
    for the node. Each node has a separate thread.
    """

    def __init__(self, rendezvous: Rendezvous, hear: Callable[[Connection, float], Any]) -> None:
        self.heard: dict[int, Any] = {}
        self._rendezvous, self._hear = rendezvous, hear
        self._connections: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._over = False
        try:
            self._server = socket.create_server(("", rendezvous.port), backlog=4096)
        except OSError as error:
            raise MeetingError(
                f"master port {rendezvous.port} is taken ({error.strerror}); submit again to use "
                "another port, or end the program that holds it (ss -ltnp)"
            ) from None

    def open(self, deadline: float) -> None:
        """Start accepting the other nodes."""
        threading.Thread(target=self._accept, args=(deadline,), daemon=True).start()

    def wait(self, deadline: float) -> None:
        """Wait until all other nodes have been heard, or the deadline has passed."""
        others = len(self._rendezvous.hosts) - 1
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.heard) >= others, max(0.0, deadline - time.monotonic())
            )

    def answer(self, answers: Mapping[int, Any], within_s: float = 1.0) -> None:
        """Send the heard nodes their answers, wait until they close, and free the port."""
        with self._changed:
            self._over = True
            connections = [(c, answers[node]) for node, c in self._connections.items()]
        threads = [threading.Thread(target=_end, args=(*c, within_s)) for c in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close()

    def close(self) -> None:
        """Free the port. This also ends a thread that waits in accept."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self, deadline: float) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._meet, args=(connection, deadline), daemon=True).start()

    def _meet(self, accepted: socket.socket, deadline: float) -> None:
        connection = Connection(accepted)
        try:
            connection.send({"meeting": self._rendezvous.name})
            hello = connection.receive(MESSAGE_S)
            node = hello["node"]
            others = range(1, len(self._rendezvous.hosts))
            if hello["meeting"] != self._rendezvous.name or node not in others:
                raise ValueError("another meeting")
            heard = self._hear(connection, deadline)
            with self._changed:
                if self._over:
                    raise ValueError("too late")
                self.heard[node], self._connections[node] = heard, connection
                self._changed.notify()
        except (OSError, ValueError, LookupError, TypeError):
            connection.close()  # another program, or a node that has gone


def _end(connection: Connection, answer: Any, within_s: float) -> None:
    with suppress(OSError):
        connection.send(answer)
    connection.await_end(within_s)


@contextmanager
def join(rendezvous: Rendezvous, reach_s: float) -> Iterator[Connection]:
    """Connect to node 0 and send this node's number; raise a MeetingError if that fails."""
    node0 = f"node 0 at {rendezvous.address}:{rendezvous.port}"
    connection = _reach(rendezvous, node0, reach_s)
    try:
        connection.send({"meeting": rendezvous.name, "node": rendezvous.node})
        yield connection
    except (OSError, ValueError, LookupError) as error:
        raise MeetingError(f"{node0} went silent ({error})") from None
    finally:
        connection.close()


def _reach(rendezvous: Rendezvous, node0: str, reach_s: float) -> Connection:
    """Connect to node 0, which may start later than this node."""
    address = (rendezvous.address, rendezvous.port)
    deadline = time.monotonic() + reach_s
    while True:
        try:
            connection = Connection(socket.create_connection(address, timeout=MESSAGE_S))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            try:
                if connection.receive(MESSAGE_S).get("meeting") == rendezvous.name:
                    return connection
                why = "another job is using that port"
            except (OSError, ValueError):
                why = "another program is using that port"
            connection.close()
        if time.monotonic() > deadline:
            raise MeetingError(f"cannot reach {node0} ({why})")
        time.sleep(_RETRY_S)
