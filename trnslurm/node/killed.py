"""Reports whether the kernel ended processes of this node when a worker was killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.files import last_line
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable
from trnslurm.node import processes

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_NEWEST_S = 90.0  # usage notes a line a minute


def ended_by_kernel() -> int | None:
    """Return how many processes of this node the kernel has killed because memory ran out.

    The kernel counts before it kills, and includes processes over a cgroup's limit
    (__oom_kill_process in mm/oom_kill.c, since Linux 4.13).
    """
    with suppress(OSError):
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(found[1]) if (found := re.search(r"^oom_kill (\d+)$", text, re.M)) else None
    return None


def tell_of_kill(codes: Mapping[int, int], before: int | None) -> None:
    """If a worker was killed, print whether the kernel killed processes of this node.

    `codes` are the failed workers' exit codes by rank. `before` is what ended_by_kernel returned
    when they were started.
    """
    killed = [rank for rank, code in codes.items() if code in _KILLED]
    after = ended_by_kernel()
    if not killed or before is None or after is None:
        return
    number = after - before
    what = f"{number or 'no'} process{'es' if number > 1 else ''} of this node"
    processes.say(
        f"trnslurm: rank {killed[0]} was killed (KILL); since the launcher's start the kernel has "
        f"ended {what} for lack of memory{_memory_before()}"
    )


def _memory_before() -> str:
    """Return the free memory shortly before, as this node recorded it."""
    values = os.environ
    if not (run := values.get(Variable.RUN_DIR)):
        return ""
    line = last_line(RunFiles(Path(run)).usage_file(values.get("SLURM_NODEID", "0")))
    with suppress(KeyError, TypeError, ValueError):  # not noted, or damaged
        left, whole, at = (float(line[k]) for k in ("memory_left_gib", "memory_gib", "time"))
        if 0 <= (age_s := time.time() - at) < _NEWEST_S:
            return f" ({age_s:.0f} s before, {left:.1f} of {whole:.1f} GiB were free)"
    return ""
