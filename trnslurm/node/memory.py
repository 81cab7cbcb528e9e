"""How much memory of this node a job can still use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_gib() -> float:
    """Return the memory that the node has, and that the cgroups of this process allow."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    return min([int(match[1]) / (1 << 20) if match else 0, *_left_by_cgroups()])


def _left_by_cgroups() -> Iterator[float]:
    """Yield how many GiB each cgroup around this process still allows, apart from cached files."""
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
                yield (most - next(int(n) for name, n in rows if name == used)) / (1 << 30)
