"""The first process of a node: sets up its namespaces, starts slurmd, and obeys the holder.

Orders and answers are lines of JSON on stdin and stdout. When stdin ends, this process ends, and
with it, as the first of its pid namespace, everything on the node.
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
import time
from pathlib import Path
from typing import Any

from trnslurm.sandbox.daemons import last_words

_MUNGE_S = 15
_ARP = 0x0806


class NodeProcess:
    """A node: its slurmd, and everything else in its namespaces."""

    def __init__(self, name: str, slurmd: list[str], log: Path) -> None:
        self._name = name
        self._slurmd = slurmd
        self._log = log
        self._pid = 0
        self._munged: tuple[list[str], Path, Path] = ([], Path(), Path())
        self._munged_pid = 0

    def obey(self, order: dict[str, Any]) -> str:
        """Carry out one order; return what was done, or raise ValueError with why not."""
        match order["do"]:
            case "boot":
                self._network(order["address"], order["bits"])
                own, heads = order["sockets"]
                self._munged = (order["munged"], Path(own), Path(heads))
                self._munge(*self._munged)
                return self._start(["-b"] if order["rebooted"] else [])
            case "announce":
                return self._announce(socket.inet_aton(order["address"]))
            case "slurmd-start":
                self.reap()
                if not self._munged_pid:  # killed with everything else; slurmd needs it
                    subprocess.run(["umount", self._munged[2]], check=True)
                    self._munge(*self._munged)
                return self._start([])
            case "slurmd-kill":
                return self._kill()
            case "slurmd-check":
                return self._check()
            case "freeze":
                return self._signal_all(signal.SIGSTOP, "frozen")
            case "thaw":
                return self._signal_all(signal.SIGCONT, "thawed")
            case "signal":
                return self._signal(re.compile(order["pattern"]), order["signal"])
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")

    def reap(self) -> None:
        """Reap what has ended: orphans become children of the first process of a pid namespace."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if pid == self._pid:
                    self._pid = 0
                if pid == self._munged_pid:
                    self._munged_pid = 0

    @staticmethod
    def _network(address: str, bits: int) -> None:
        """Set the address; one process for all three, as each costs what all do."""
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
        """Tell all who has this address (gratuitous ARP, RFC 5227): eth0 is new with each boot.

        For up to half a minute the other nodes send to the old one.
        """
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as link:
            link.bind(("eth0", _ARP))
            card = link.getsockname()[4]
            head = b"\xff" * 6 + card + struct.pack("!HHHBBH", _ARP, 1, 0x0800, 6, 4, 1)
            link.send(head + card + address + bytes(6) + address)
        return "announced"

    def _munge(self, command: list[str], own: Path, heads: Path) -> None:
        """Start the node's munged, in the place of the head node's."""
        own.unlink(missing_ok=True)  # of before a reboot
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _MUNGE_S
        while not own.is_socket():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"munged on {self._name} did not start: {last_words(self._log)}")
            time.sleep(0.02)
        process.returncode = 0  # reap() waits for it, not Popen
        self._munged_pid = process.pid
        subprocess.run(["mount", "--bind", own, heads], check=True)

    def _start(self, options: list[str]) -> str:
        if self._pid:
            raise ValueError(f"slurmd runs on {self._name} already")
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*self._slurmd, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process.returncode = 0  # reap() waits for it, not Popen
        self._pid = process.pid
        return "slurmd started"

    def _check(self) -> str:
        self.reap()
        if not self._pid:
            raise ValueError(f"slurmd on {self._name} ended: {last_words(self._log)}")
        return "slurmd runs"

    def _kill(self) -> str:
        if not self._pid:
            raise ValueError(f"slurmd does not run on {self._name}")
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = 0
        return "slurmd killed"

    @staticmethod
    def _signal_all(number: int, word: str) -> str:
        for _ in range(2):  # again for what forked during the first round
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
        return word

    def _signal(self, pattern: re.Pattern[str], number: int) -> str:
        """Signal every process here but this one whose command line matches."""
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
        return f"{count} {'process' if count == 1 else 'processes'} signalled"


def main() -> None:
    """Run as `python -m trnslurm.sandbox.node_init NAME LOG SLURMD…` in new namespaces."""
    name, log, *slurmd = sys.argv[1:]
    pid = str(Path("/proc/self").readlink())  # as the holder sees it, until /proc is our own
    socket.sethostname(name)
    for words in (
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
    ):
        subprocess.run(["mount", *words], check=True)
    node = NodeProcess(name, slurmd, Path(log))
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
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
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
