"""Reads the activity of this node's processors, memory and network from /proc and /sys."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trnslurm.node.fabric import fabric_interfaces
from trnslurm.node.memory import memory

Figures = dict[str, float]

_GIB = 1 << 30
_MB = 1e6
_SHM = "/dev/shm"
# Bytes received and sent: for EFA (Linux's efa_verbs.c), and for InfiniBand and RoCE, in words of
# four bytes (Documentation/ABI/stable/sysfs-class-infiniband).
_FABRIC_BYTES = (
    ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1),
    ("counters/port_rcv_data", "counters/port_xmit_data", 4),
)
# Error counters. EFA has them on Nitro v4 and later.
FABRIC_ERRORS = {
    "hw_counters/unresponsive_remote_events": "remote nodes did not respond",
    "hw_counters/impaired_remote_conn_events": "connections were impaired",
    "counters/link_downed": "the link went down",
    "counters/local_link_integrity_errors": "the link had errors",
}


class Host:
    """This node's metrics since the last look."""

    def __init__(self, root: Path = Path("/"), run: Path = Path()) -> None:
        """Read files below `root`; `run` is the run directory."""
        self._root, self._run = root, run
        self._at = time.monotonic()
        self._counted = self._count()

    def look(self) -> Figures:
        """Return the metrics, without those that cannot be read."""
        before, since = self._counted, self._at
        self._counted, self._at = self._count(), time.monotonic()
        passed_s = max(self._at - since, 1e-6)
        more = {k: max(0.0, n - before[k]) for k, n in self._counted.items() if k in before}
        found: Figures = {}
        if ticks := more.pop("busy", 0.0) + more.get("idle", 0.0):
            found["cpu"] = 1 - more.pop("idle") / ticks
        found |= {f"{name}_mb_s": n / _MB / passed_s for name, n in more.items() if name != "idle"}
        with suppress(OSError, ValueError):
            left, whole = memory()
            found |= {"memory_left_gib": left, "memory_gib": whole}
        places = {"shm": _SHM, "run": str(self._run), "tmp": os.environ.get("TMPDIR", "/tmp")}
        for name, place in places.items():
            with suppress(OSError):
                there = os.statvfs(place)
                found[f"{name}_left_gib"] = there.f_bavail * there.f_frsize / _GIB
        return found

    def errors(self) -> dict[str, int]:
        """Return the fabric's error counters, by what they count."""
        found = {}
        for port in self._ports():
            for file, words in FABRIC_ERRORS.items():
                with suppress(OSError, ValueError):
                    found[f"{port.parents[1].name}: {words}"] = int((port / file).read_text())
        return found

    def _count(self) -> Figures:
        """Return all counters, without those that are missing or odd."""
        found: Figures = {}
        for part in (self._processors, self._network, self._fabric):
            with suppress(OSError, ValueError, IndexError):
                found |= part()
        return found

    def _processors(self) -> Figures:
        """Return the busy and idle ticks of the processors that the job may use."""
        own = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        ticks = [0.0, 0.0]
        for line in (self._root / "proc/stat").read_text(encoding="ascii").splitlines():
            name, *numbers = line.split()
            if name in own:
                # user nice system idle iowait irq softirq steal, proc_stat(5)
                idle = int(numbers[3]) + int(numbers[4])
                ticks[0] += sum(map(int, numbers[:8])) - idle
                ticks[1] += idle
        return {"busy": ticks[0], "idle": ticks[1]} if any(ticks) else {}

    def _network(self) -> Figures:
        found = {"net_in": 0.0, "net_out": 0.0}
        for line in (self._root / "proc/net/dev").read_text(encoding="ascii").splitlines()[2:]:
            name, _, rest = line.partition(":")
            # A bond repeats its members' counts, and a bridge counts its guests' traffic.
            if not re.fullmatch(r"\s*(lo|bond.*|docker.*|br-.*|veth.*|virbr.*)", name):
                numbers = rest.split()
                found["net_in"] += int(numbers[0])
                found["net_out"] += int(numbers[8])
        return found

    def _fabric(self) -> Figures:
        found: Figures = {}
        for port in self._ports():
            for received, sent, unit in _FABRIC_BYTES:
                with suppress(OSError, ValueError):
                    moved = [int((port / file).read_text()) * unit for file in (received, sent)]
                    found["fabric_in"] = found.get("fabric_in", 0.0) + moved[0]
                    found["fabric_out"] = found.get("fabric_out", 0.0) + moved[1]
                    break
        return found

    def _ports(self) -> Iterator[Path]:
        for interface in fabric_interfaces(self._root):
            yield from interface.glob("ports/*")
