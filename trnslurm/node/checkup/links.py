"""Node 0 meets every other node in turn: it times the link to each, then tells them what to do.

One TCP connection per node, on the master port, with lines of JSON; between them a stream of bytes
that ends after a second or 64 MiB. TCP shows a bad cable, a throttled or a mistaken interface; what
EFA carries is measured by the workers' all-reduce.
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_CHUNK = bytes(256 << 10)
_MORE, _END = b"+", b"."
MOST_BYTES = 64 << 20
MOST_S = 1.0
_STEP_S = 60.0
"""How long the other side may be silent: a slow link empties its buffers first."""
_RETRY_S = 0.1


class LinkError(Exception):
    """Two nodes do not talk to each other, and why."""


class Link:
    """A connection between node 0 and another node."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_STEP_S)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def say(self, **data: Any) -> None:
        """Send a line."""
        self._file.write(json.dumps(data).encode() + b"\n")
        self._file.flush()

    def hear(self, timeout_s: float = _STEP_S) -> dict[str, Any]:
        """Wait for a line."""
        self._connection.settimeout(timeout_s)
        line = self._file.readline(1 << 20)
        self._connection.settimeout(_STEP_S)
        data = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(data, dict):
            raise ValueError("the other side is gone")
        return data

    def stream(self) -> None:
        """Send bytes until it is enough."""
        deadline, sent = time.monotonic() + MOST_S, 0
        while sent < MOST_BYTES and time.monotonic() < deadline:
            self._file.write(_MORE + _CHUNK)
            sent += len(_CHUNK)
        self._file.write(_END)
        self._file.flush()

    def time_stream(self) -> float:
        """Read what the other side sends; return MB/s."""
        start, received = time.monotonic(), 0
        while (mark := self._file.read(1)) == _MORE:
            received += len(self._file.read(len(_CHUNK)))
        if mark != _END:
            raise ValueError("the other side is gone")
        return received / 1e6 / max(1e-6, time.monotonic() - start)

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._file.close()
        self._connection.close()

    def await_end(self) -> None:
        """Let the other side hang up first: what lingers is then no port of ours."""
        with suppress(OSError, ValueError):
            self._connection.settimeout(2.0)
            self._file.read(1)
        self.close()


class Host:
    """Node 0's side."""

    def __init__(self, port: int, num_nodes: int) -> None:
        self._server = socket.create_server(("", port), backlog=4096)
        self._num_nodes = num_nodes
        self.links: dict[int, Link] = {}
        self.rates: dict[str, dict[str, float]] = {}
        """Node -> MB/s `to` it and `from` it."""

    def meet(self, timeout_s: float) -> None:
        """Let every other node come, and time its link as the only one that is busy."""
        deadline = time.monotonic() + timeout_s
        while len(self.links) < self._num_nodes - 1 and time.monotonic() < deadline:
            self._server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                return
            link = Link(connection)
            try:
                link.say(checkup=True)
                node = int(link.hear(5.0)["node"])
                rate_from = link.time_stream()
                link.stream()
                heard = link.hear()
            except (OSError, ValueError, LookupError, TypeError):
                link.close()  # a stranger, or a node that died: it is missed
                continue
            self.links[node] = link
            self.rates[str(node)] = {"to": float(heard["rate"]), "from": rate_from}

    def ask_all(self, order: dict[str, Any], timeout_s: float) -> None:
        """Have every node that came carry out an order, and wait until it has; then part."""
        for link in self.links.values():
            with suppress(OSError):
                link.say(**order)
        deadline = time.monotonic() + timeout_s
        for link in self.links.values():
            with suppress(OSError, ValueError):
                link.hear(max(0.01, deadline - time.monotonic()))
            link.await_end()

    def close(self) -> None:
        """Free the port."""
        self._server.close()


def take_part(
    address: str,
    port: int,
    node: int,
    obey: Callable[[dict[str, Any]], None],
    *,
    reach_s: float,
    order_s: float,
) -> None:
    """Take another node's part: be measured, wait for node 0's order, carry it out."""
    link = _reach(address, port, reach_s)
    try:
        link.say(node=node)
        link.stream()
        link.say(rate=link.time_stream())
        order = link.hear(order_s)
        obey(order)
        link.say(done=True)
    except (OSError, ValueError) as error:
        raise LinkError(f"node 0 at {address}:{port} went silent ({error})") from None
    finally:
        link.close()


def _reach(address: str, port: int, reach_s: float) -> Link:
    """Connect to node 0, which may begin later than this node."""
    deadline = time.monotonic() + reach_s
    while True:
        try:
            link = Link(socket.create_connection((address, port), timeout=5.0))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            try:
                if link.hear(reach_s).get("checkup"):
                    return link
                why = "another program answers there"
            except (OSError, ValueError):
                why = "another program answers there"
            link.close()
        if time.monotonic() > deadline:
            raise LinkError(f"cannot reach node 0 at {address}:{port} ({why})")
        time.sleep(_RETRY_S)
