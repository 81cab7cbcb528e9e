"""The holder's side of a node: its first process, its network cable and its orders."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from trnslurm.errors import SandboxError
from trnslurm.sandbox.daemons import run
from trnslurm.sandbox.layout import Layout, replace_text
from trnslurm.sandbox.settings import PREFIX_BITS, node_address

BRIDGE = "cluster"
_ANSWER_S = 20
_UNSHARE = ("unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child")


class NodeLink:
    """One node, on or off."""

    def __init__(
        self,
        layout: Layout,
        number: int,
        name: str,
        *,
        slurmd: Sequence[str],
        munged: Sequence[str],
    ) -> None:
        self._layout = layout
        self._number = number
        self.name = name
        self.address = node_address(number)
        self._munged = list(munged)
        self._slurmd = [*slurmd, "-D", "-N", name]
        self._process: subprocess.Popen[str] | None = None

    def power_on(self, *, rebooted: bool = False) -> None:
        """Start the first process in new namespaces; `plug_in` waits for it."""
        if self._process:
            raise SandboxError(f"{self.name} is already on")
        self._rebooted = rebooted
        program = [sys.executable, "-m", "trnslurm.sandbox.node_init"]
        log = self._layout.log / f"{self.name}.out"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*_UNSHARE, "--propagation=slave", *program, self.name, log, *self._slurmd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def plug_in(self) -> None:
        """Wait for the first process, plug in the cable, and have it start munged and slurmd.

        `connect` waits for both daemons, so that all nodes start them at the same time.
        """
        inner = self._answer()
        replace_text(self._layout.node_pid(self._number), f"{inner}\n")
        cable, pid = self._cable, str(self._on().pid)
        run(["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid])
        run(["ip", "link", "set", cable, "master", BRIDGE, "up"])
        own, head = f"munge-{self._number}.sock", "munge.sock"
        self._send(
            do="boot",
            address=self.address,
            bits=PREFIX_BITS,
            munged=self._munged,
            sockets=[str(self._layout.run / name) for name in (own, head)],
            rebooted=self._rebooted,
        )

    def connect(self) -> None:
        """Wait until the node's slurmd has started."""
        self._answer()

    def power_off(self) -> None:
        """End everything on the node immediately."""
        process = self._on()
        self._off()
        process.kill()  # --kill-child: the first process goes with it
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                _open(stream).close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        process.returncode = -signal.SIGKILL
        with contextlib.suppress(SandboxError):  # gone with the namespace
            run(["ip", "link", "delete", self._cable])

    def link(self, state: str) -> str:
        """Pull the cable (`down`) or plug it in (`up`)."""
        self._on()
        run(["ip", "link", "set", self._cable, state])
        return f"link {state}"

    def order(self, **words: Any) -> str:
        """Give the first process an order; return its answer."""
        self._send(**words)
        return self._answer()

    def ended(self, pids: set[int]) -> None:
        """Note which children have ended; a node whose first process has ended is off."""
        if self._process and self._process.pid in pids:
            self._process.returncode = -signal.SIGKILL
            self._off()

    @property
    def is_on(self) -> bool:
        return self._process is not None

    def _off(self) -> None:
        self._process = None
        self._layout.node_pid(self._number).unlink(missing_ok=True)

    @property
    def _cable(self) -> str:
        return f"node{self._number}"

    def _on(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise SandboxError(f"{self.name} is off: start it with power-on")
        return self._process

    def _send(self, **words: Any) -> None:
        stream = _open(self._on().stdin)
        stream.write(json.dumps(words) + "\n")
        stream.flush()

    def _answer(self) -> str:
        stream = _open(self._on().stdout)
        ready, _, _ = select.select([stream], [], [], _ANSWER_S)
        line = stream.readline() if ready else ""
        if not line:
            raise SandboxError(f"{self.name} does not answer: see {self._layout.log}")
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer["ok"]


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
