"""Tells which nodes of a training are still there, long before Slurm does.

The program that looks out on each node sends a datagram every few seconds; the attempt's program,
on the first node, notes who does. A node that has sent and then is silent is lost if its slurmd
does not answer either. The same way back, the attempt's program has all other nodes kill their
processes: a step with a lost node does not end by itself before Slurm's SlurmdTimeout. It answers
each datagram; first.py acts if no answer comes.
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
# The kernel grants less (net.core.rmem_max), and counts some 700 bytes for each datagram.
_BUFFER = 4 << 20


class Beat(NamedTuple):
    """A sign of life of a node."""

    node: int
    attempt: int
    ended: bool = False
    """Whether the node's processes have ended, or were killed as they were told."""


class Beats:
    """The signs of life of a job's nodes, on the first of them."""

    def __init__(self, address: str) -> None:
        """Listen; `address` is this node's for the others."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        # The network can forge neither a sign of life nor an order.
        self._secret = secrets.token_hex(16).encode()
        self.place = f"{address}:{self._socket.getsockname()[1]}:{self._secret.decode()}"
        """The value of TRNSLURM_BEATS."""
        self._from: dict[tuple[int, int], tuple[str, int]] = {}

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> Iterator[Beat]:
        """Answer all that has arrived, and yield it."""
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
        """Tell nodes to kill their processes; they answer once they have."""
        for node in nodes:
            if to := self._from.get((attempt, node)):
                with suppress(OSError):
                    self._socket.sendto(self._secret + b" " + _END, to)


class Sender:
    """Sends the signs of life of one node, and hears the order to end its processes."""

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
        """For how long the first node has not answered."""
        return time.monotonic() - self._heard

    def hears(self, within_s: float, *, ended: bool = False) -> bool:
        """Send a sign of life, or that the node's part has ended; return whether it is answered."""
        before = self._heard
        self.send(_ENDED if ended else _LIVES)
        select.select([self._socket], [], [], within_s)
        self.told_to_end()
        return self._heard > before

    def send_if_due(self) -> float:
        """Send a sign of life if it is time; return in how many seconds the next one is due.

        An answer to the last one must not cause the next.
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
        """Read all that has arrived; return whether the order was there."""
        told = False
        with suppress(BlockingIOError):
            while True:
                data = self._socket.recv(_MOST_BYTES)
                told = told or secrets.compare_digest(data, self._secret + b" " + _END)
                if secrets.compare_digest(data, self._secret + b" " + _HERE):
                    self._heard = time.monotonic()
        return told

    def say_ended(self) -> None:
        """Tell that this node's processes have ended."""
        for _ in range(3):  # one may get lost
            self.send(_ENDED)
            time.sleep(0.1)


def answers(address: str, port: int, within_s: float = 3.0) -> bool:
    """Check whether a host answers at a port, if only to refuse."""
    try:
        with socket.create_connection((address, port), within_s):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
