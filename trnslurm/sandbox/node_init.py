"""The first process of a node: sets up its namespaces, starts slurmd, and obeys the holder.

Orders and answers are lines of JSON on stdin and stdout. When stdin ends, this process ends. It is
the first process in its pid namespace, so everything on the node ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from trnslurm.errors import SandboxError
from trnslurm.sandbox.daemons import Daemons, watch_children

_MUNGE_S = 15
_ARP = 0x0806


class NodeProcess:
    """A node: its slurmd, and everything else in its namespaces."""

    def __init__(self, name: str, slurmd: list[str], log: Path) -> None:
        self._name, self._slurmd = name, slurmd
        self._daemons = Daemons(lambda _: log, f" on {name}")
        self._munge_order: dict[str, Any] = {}
        """The order that says how to start munged."""

    def obey(self, order: dict[str, Any]) -> str:
        """Carry out one order; return the result, or raise the reason for failing."""
        match order["do"]:
            case "boot":
                self._network(order["address"], order["bits"])
                self._munge_order = order
                self._munge()
                return self._start(["-b"] if order["rebooted"] else [])
            case "announce":
                return self._announce(socket.inet_aton(order["address"]))
            case "slurmd-start":
                self.reap()
                if "munged" not in self._daemons.running():  # killed, and slurmd needs it
                    subprocess.run(["umount", self._munge_order["sockets"][1]], check=True)
                    self._munge()
                return self._start([])
            case "slurmd-kill":
                self._daemons.kill("slurmd")
                return "slurmd killed"
            case "slurmd-check":
                self._daemons.check("slurmd")
                return "slurmd is running"
            case "freeze":
                return self._signal_all(signal.SIGSTOP, "frozen")
            case "thaw":
                return self._signal_all(signal.SIGCONT, "thawed")
            case "signal":
                return self._signal(re.compile(order["pattern"]), order["signal"])
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")

    def reap(self) -> None:
        """Reap ended processes: orphans become children of a pid namespace's first process."""
        self._daemons.reap()

    @staticmethod
    def _network(address: str, bits: int) -> None:
        """Set the address, with one process for all three commands, because each start is slow."""
        lines = ("link set lo up", f"address add {address}/{bits} dev eth0", "link set eth0 up")
        done = subprocess.run(
            ["ip", "-batch", "-"],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"ip: {' '.join(done.stderr.split())}")

    @staticmethod
    def _announce(address: bytes) -> str:
        """Tell the other nodes that this node has this address (gratuitous ARP, RFC 5227).

        eth0 is new with each boot, and for up to half a minute they would send to the old one.
        """
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as link:
            link.bind(("eth0", _ARP))
            card = link.getsockname()[4]
            head = b"\xff" * 6 + card + struct.pack("!HHHBBH", _ARP, 1, 0x0800, 6, 4, 1)
            link.send(head + card + address + bytes(6) + address)
        return "announced"

    def _munge(self) -> None:
        """Start the node's munged, whose socket replaces the head node's."""
        own, head = map(Path, self._munge_order["sockets"])
        own.unlink(missing_ok=True)  # from before a reboot
        self._daemons.start("munged", self._munge_order["munged"])
        self._daemons.wait("munged", own.is_socket, _MUNGE_S)
        subprocess.run(["mount", "--bind", own, head], check=True)

    def _start(self, options: list[str]) -> str:
        self._daemons.start("slurmd", [*self._slurmd, *options])
        return "slurmd started"

    @staticmethod
    def _signal_all(number: int, word: str) -> str:
        for _ in range(2):  # again for processes forked during the first round
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
        return word

    def _signal(self, pattern: re.Pattern[str], number: int) -> str:
        """Signal every other process of the node whose command line matches."""
        count = 0
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with contextlib.suppress(OSError):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                line = b" ".join(words).decode(errors="replace").strip()
                if pid != os.getpid() and line and pattern.search(line):
                    os.kill(pid, number)
                    count += 1
        if not count:
            raise ValueError(f"no process on {self._name} matches {pattern.pattern!r}")
        return f"{count} {'process' if count == 1 else 'processes'} signaled"


def main() -> None:
    """Run as `python -m trnslurm.sandbox.node_init NAME LOG SLURMD…` in new namespaces."""
    name, log, *slurmd = sys.argv[1:]
    pid = str(Path("/proc/self").readlink())  # as the holder sees it: /proc is not mounted yet
    socket.sethostname(name)
    for words in (
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
    ):
        subprocess.run(["mount", *words], check=True)
    node = NodeProcess(name, slurmd, Path(log))
    wake = watch_children()
    print(json.dumps({"ok": pid}), flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            node.reap()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            try:
                answer = {"ok": node.obey(json.loads(line))}
            except (SandboxError, ValueError, OSError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
