"""The nodes of a job meet on the master port: each reports to node 0, and hears its word.

Lines of JSON. The server greets, so that a client knows it from a stranger on the same port; the
client says who it is; its clock is asked for; it sends its report; it gets an answer. It closes
first: connections that linger then keep no port of the server's, which torchrun is to have next.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_RETRY_S = 0.1
_STEP_S = 5.0
"""How long one message may take that the other side sends at once."""
_MOST_BYTES = 2**20
_HANG_UP = struct.pack("ii", 1, 0)  # SO_LINGER: a connection that we have to cut off is reset


class MeetingError(Exception):
    """Nodes do not come together, and why."""


@dataclass
class Guest:
    """A node that came."""

    lines: "Lines"
    clock_s: float
    """How far its clock is ahead of ours, as little of it as the round trip leaves certain."""
    report: dict[str, Any]


class Lines:
    """A connection as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, data: Any) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(data).encode() + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a message; anything else is an error."""
        self._connection.settimeout(max(0.01, timeout_s))
        line = self._file.readline(_MOST_BYTES)
        data = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(data, dict):
            raise ValueError("not a message of a preflight")
        return data

    def await_end(self) -> None:
        """Let the other side close first."""
        try:
            self._connection.settimeout(1.0)
            if self._file.read(1):
                raise ValueError("a word too many")
        except (OSError, ValueError):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._connection.close()


@dataclass
class Host:
    """Node 0's side."""

    port: int
    job: str
    """What all nodes of the job have in common, and no other job has."""
    num_nodes: int
    guests: dict[int, Guest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all_there = threading.Condition()
        try:
            self._server = socket.create_server(("", self.port), backlog=4096)
        except OSError as error:
            raise MeetingError(
                f"master port {self.port} is taken ({error.strerror}); submit again, which chooses"
                " another, or end what holds it (ss -ltnp)"
            ) from None

    def open(self, deadline: float) -> None:
        """Begin to let guests in, each with a thread of its own."""
        threading.Thread(target=self._accept, args=(deadline,), daemon=True).start()

    def wait(self, number: int, deadline: float) -> None:
        """Wait until so many have reported."""
        with self._all_there:
            self._all_there.wait_for(
                lambda: len(self.guests) >= number, max(0.0, deadline - time.monotonic())
            )

    def tell(self, answers: Mapping[int, dict[str, Any]]) -> None:
        """Give every guest its answer, and close the port."""
        with self._all_there:
            guests = [(guest, answers[node]) for node, guest in self.guests.items()]
        threads = [threading.Thread(target=self._dismiss, args=pair) for pair in guests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close()

    def close(self) -> None:
        """Free the port; a thread that still waits in accept keeps it no longer."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._server.close()

    def _accept(self, deadline: float) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connection, deadline), daemon=True).start()

    def _receive(self, connection: socket.socket, deadline: float) -> None:
        lines = Lines(connection)
        try:
            lines.send({"preflight": self.job})
            hello = lines.receive(_STEP_S)
            node = hello["node"]
            if hello["job"] != self.job or node not in range(1, self.num_nodes):
                raise ValueError("of another job")
            sent = time.time()
            lines.send({"time": sent})
            then = float(lines.receive(_STEP_S)["time"])
            clock_s = _ahead(then, sent, time.time())
            report = lines.receive(deadline - time.monotonic())
            with self._all_there:
                self.guests[node] = Guest(lines, clock_s, report)
                self._all_there.notify()
        except (OSError, ValueError, LookupError, TypeError):
            lines.close()  # a stranger, or a node that is gone: it will be missed

    @staticmethod
    def _dismiss(guest: Guest, answer: dict[str, Any]) -> None:
        try:
            guest.lines.send(answer)
        except OSError:
            pass
        guest.lines.await_end()


def _ahead(then: float, sent: float, received: float) -> float:
    """Return a clock's lead: it was read at some moment between two readings of ours."""
    if sent <= then <= received:
        return 0.0
    return then - received if then > received else then - sent


def report_to(
    address: str,
    port: int,
    who: dict[str, Any],
    make_report: Callable[[], dict[str, Any]],
    *,
    clock: Callable[[], float],
    reach_s: float,
    answer_s: float,
) -> dict[str, Any]:
    """Report to node 0, and return its answer, or say why there is none."""
    lines = _reach(address, port, str(who["job"]), reach_s)
    try:
        lines.send(who)
        lines.receive(_STEP_S)
        lines.send({"time": clock()})
        lines.send(make_report())
        return lines.receive(answer_s)
    except (OSError, ValueError, LookupError) as error:
        raise MeetingError(f"node 0 at {address}:{port} went silent ({error})") from None
    finally:
        lines.close()


def _reach(address: str, port: int, job: str, reach_s: float) -> Lines:
    """Connect to node 0, which may begin later than this node."""
    deadline = time.monotonic() + reach_s
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=min(_STEP_S, reach_s))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            lines = Lines(connection)
            try:
                if lines.receive(min(_STEP_S, reach_s)).get("preflight") == job:
                    return lines
                why = "another job answers there"
            except (OSError, ValueError):
                why = "another program answers there"
            lines.close()
        if time.monotonic() > deadline:
            raise MeetingError(f"cannot reach node 0 at {address}:{port} ({why})")
        time.sleep(_RETRY_S)
