"""How much of this node's memory a job has, and can still use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """The memory in GiB that a job may use, and how much of it is still free."""

    left: float
    whole: float


def memory() -> HostMemory:
    """Return the node's memory, or the limits of the tightest cgroup around this process."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    left, whole = (
        re.search(rf"^{n}: +(\d+) kB$", text, re.M) for n in ("MemAvailable", "MemTotal")
    )
    gib = [int(match[1]) / (1 << 20) if match else 0.0 for match in (left, whole)]
    return min([HostMemory(*gib), *_of_cgroups()])


def available_gib() -> float:
    """Return the memory that a job can still use."""
    return memory().left


def _of_cgroups() -> Iterator[HostMemory]:
    """Yield what each cgroup around this process allows. Cached files do not count as used."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, limit, used = "/sys/fs/cgroup", "memory.max", "anon"
        elif "memory" in controllers.split(","):
            root, limit, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        group = Path(root + path)
        for each in [group, *group.parents]:
            with suppress(OSError, ValueError, StopIteration):  # no limit, or not a cgroup
                most = int((each / limit).read_text(encoding="ascii"))
                rows = map(
                    str.split, (each / "memory.stat").read_text(encoding="ascii").splitlines()
                )
                left = most - next(int(n) for name, n in rows if name == used)
                yield HostMemory(left / (1 << 30), most / (1 << 30))
