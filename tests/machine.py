"""What the machine is doing: a failed test says so."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

_PROCESSES = 12


def state() -> str:
    """Return load, pressure, memory, disk, and the processes that run or wait for the disk."""
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    lines = [f"load {load} on {os.cpu_count()} processors"]
    for kind in ("cpu", "io", "memory"):
        with suppress(OSError):  # not every kernel has it
            some = Path(f"/proc/pressure/{kind}").read_text().splitlines()[0]
            lines.append(f"waited for {kind}: {some.removeprefix('some ')}")
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    lines.append(f"memory available:{memory['MemAvailable']} of {memory['MemTotal'].strip()}")
    lines.append(f"disk free in /tmp: {shutil.disk_usage('/tmp').free >> 20} MiB")
    busy = sorted(_busy())
    lines += [f"{len(busy)} processes run or wait for the disk:", *busy[:_PROCESSES]]
    return "\n".join(lines)


def _busy() -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
            words = (
                (directory / "cmdline")
                .read_bytes()
                .replace(bytes(1), b" ")
                .decode(errors="replace")
            )
            if state in "RD" and words and directory.name != str(os.getpid()):
                found.append(f"  {state} {directory.name} {words[:100]}")
    return found
