"""Detects lost nodes by heartbeats, long before Slurm does.

The lookout program on each node sends a datagram every few seconds. The attempt program, on the
first node, records which nodes have sent one. A node that has sent heartbeats and then falls silent
is lost if its slurmd does not respond either. Over the same channel, the attempt program orders all
other nodes to kill their processes, because a step with a lost node does not end by itself before
Slurm's SlurmdTimeout. The attempt program replies to each datagram. first.py acts if no reply
comes.
"""

import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from trnslurm.contract.variables import Variable

PERIOD_S = 2.0
SILENT_S = 6.0
_LIVES, _END, _ENDED, _HERE = b"lives", b"end", b"ended", b"here"
_MOST_BYTES = 128
# The kernel may grant less (net.core.rmem_max). It counts about 700 bytes per datagram.
_BUFFER = 4 << 20


class Beat(NamedTuple):
    """A node's heartbeat."""

    node: int
    attempt: int
    ended: bool = False
    """Whether the node's processes have ended, or were killed on our order."""


class Beats:
    """The heartbeats of a job's nodes, received on the first node."""

    def __init__(self, address: str) -> None:
        """Start to listen; `address` is this node's address as seen from the others."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        # Others on the network can forge neither heartbeats nor orders.
        self._secret = secrets.token_hex(16).encode()
        self.place = f"{address}:{self._socket.getsockname()[1]}:{self._secret.decode()}"
        """The value of TRNSLURM_BEATS."""
        self._from: dict[tuple[int, int], tuple[str, int]] = {}

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> Iterator[Beat]:
        """Reply to all heartbeats that have arrived, and yield them."""
        while True:
            try:
                data, sender = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            words = data.split()
            if len(words) != 4 or not secrets.compare_digest(words[0], self._secret):
                continue
            with suppress(OSError):
                self._socket.sendto(self._secret + b" " + _HERE, sender)
            if words[1].isdigit() and words[2].isdigit():
                attempt, node = int(words[1]), int(words[2])
                self._from[attempt, node] = sender
                yield Beat(node, attempt, words[3] == _ENDED)

    def end(self, attempt: int, nodes: Iterable[int]) -> None:
        """Order nodes to kill their processes. They reply when they have done so."""
        for node in nodes:
            if to := self._from.get((attempt, node)):
                with suppress(OSError):
                    self._socket.sendto(self._secret + b" " + _END, to)


class Sender:
    """Sends one node's heartbeats, and receives the order to end its processes."""

    def __init__(self, attempt: int, node: int) -> None:
        address, port, secret = os.environ[Variable.BEATS].split(":")
        self._to, self._secret = (address, int(port)), secret.encode()
        self._who = f"{attempt} {node}".encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._heard = self._due = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def silent_s(self) -> float:
        """The time since the first node last replied."""
        return time.monotonic() - self._heard

    def hears(self, within_s: float, *, ended: bool = False) -> bool:
        """Send a heartbeat, or that the node's part has ended; return whether a reply came."""
        before = self._heard
        self.send(_ENDED if ended else _LIVES)
        select.select([self._socket], [], [], within_s)
        self.told_to_end()
        return self._heard > before

    def send_if_due(self) -> float:
        """Send a heartbeat if one is due; return the seconds until the next one is due.

        A reply to the last heartbeat must not trigger the next one.
        """
        now = time.monotonic()
        if now >= self._due:
            self.send()
            self._due = now + PERIOD_S
        return self._due - now

    def send(self, word: bytes = _LIVES) -> None:
        with suppress(OSError):
            self._socket.sendto(b" ".join((self._secret, self._who, word)), self._to)

    def told_to_end(self) -> bool:
        """Read all that has arrived; return whether it contained the order to end."""
        told = False
        with suppress(BlockingIOError):
            while True:
                data = self._socket.recv(_MOST_BYTES)
                told = told or secrets.compare_digest(data, self._secret + b" " + _END)
                if secrets.compare_digest(data, self._secret + b" " + _HERE):
                    self._heard = time.monotonic()
        return told

    def say_ended(self) -> None:
        """Report that this node's processes have ended."""
        for _ in range(3):  # a datagram may get lost
            self.send(_ENDED)
            time.sleep(0.1)


def answers(address: str, port: int, within_s: float = 3.0) -> bool:
    """Check whether a host responds at a port, even if it only refuses the connection."""
    try:
        with socket.create_connection((address, port), within_s):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
