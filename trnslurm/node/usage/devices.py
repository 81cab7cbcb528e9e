"""Makes the vendor's own tool report regularly what this node's devices do.

The tool is one process that runs next to this program for the whole phase. If it is missing, ends,
hangs or prints anything unexpected, only its metrics are lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Optional

from trnslurm.node.processes import start_group

Errors = dict[str, int]

_PART_BYTES, _MOST_PARTS = 1 << 16, 16
_MOST_BYTES = _PART_BYTES * _MOST_PARTS
_PAUSES_S = (0.0, 30.0, 300.0)
"""The pauses before each restart of a tool that has ended."""


class DeviceUse(NamedTuple):
    """The activity of a GPU or NeuronCore; None where its tool reports nothing."""

    use: float | None = None
    """The share of time in which it was computing."""
    memory_gib: float | None = None
    power_w: float | None = None
    mhz: float | None = None
    slowed_by: str = ""
    """What lowers its clock: heat, or its power supply."""


class DeviceReport(NamedTuple):
    """One report of a tool."""

    kind: str
    """The devices' name: GPU or NeuronCore."""
    devices: Mapping[int, DeviceUse]
    errors: Errors
    """Error counters, by what they count."""


Parse = Callable[[list[str]], Optional[DeviceReport]]


class Tool(NamedTuple):
    """A command that reports regularly, and the function that reads its output."""

    command: Sequence[str]
    parse: Parse


class Devices:
    """The newest report of the first tool that works."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = list(tools)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._start_at = 0, time.monotonic()
        self._text = b""
        self._reported = False

    def report(self) -> DeviceReport | None:
        """Return what the tool has reported since the last call, or None."""
        if self._process is None and self._tools and time.monotonic() >= self._start_at:
            self._start()
        if self._process is None:
            return None
        ended = self._read(self._process)
        lines, _, rest = self._text.rpartition(b"\n")
        self._text = rest[-_MOST_BYTES:]
        found = self._tools[0].parse(lines.decode(errors="replace").splitlines()) if lines else None
        self._reported = self._reported or found is not None
        if ended:
            self._give_up()
        return found

    def close(self) -> None:
        """End the tool."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdout:
                self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        try:
            # In its own process group, because neuron-monitor starts more processes.
            self._process = start_group(
                self._tools[0].command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._tools = []
            return
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._starts += 1

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Read what is available; return whether the tool has ended."""
        assert process.stdout
        for _ in range(_MOST_PARTS):
            try:
                part = os.read(process.stdout.fileno(), _PART_BYTES)
            except BlockingIOError:
                return False
            if not part:
                return True
            self._text = (self._text + part)[-_MOST_BYTES:]
        return False

    def _give_up(self) -> None:
        """Switch to the next tool if this one never worked, or restart it after a while."""
        self.close()
        self._text = b""
        if not self._reported:
            self._tools, self._starts = self._tools[1:], 0
        elif self._starts >= len(_PAUSES_S):
            self._tools = []
        else:
            self._start_at = time.monotonic() + _PAUSES_S[self._starts]
