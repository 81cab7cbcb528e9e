"""torchrun, but its process ends at once, and tells whether the kernel killed a worker.

    python -m trnslurm.node.torchrun --nnodes=2 … train.py …

Python takes a third of a second to tear PyTorch down. srun ends the nodes after the one that failed
first, so that the next attempt waits for it twice.

The first node has the store in which the nodes meet after the training. It ends after the others:
else they print that the connection was closed, on a run that completed.
"""

import atexit
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.utils import store as store_util
from torch.distributed.run import main

from trnslurm.contract.files import last_line
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_NEWEST_S = 90.0  # usage notes a line a minute
_LEAVE_S = 5.0
_LEFT = "trnslurm/left"


def run() -> int:
    """Run torchrun; return its exit code."""
    before = _ended_by_kernel()
    store_util.barrier = _leave_last(store_util.barrier)
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _tell_of_kill(getattr(error, "failures", {}), before)
        return 1
    return 0


def _leave_last(barrier: Callable[..., None]) -> Callable[..., None]:
    """Return torchrun's barrier, after which the first node waits for the others to pass it.

    Only _exit_barrier of torch.distributed.elastic.agent.server.api calls the barrier.
    """

    def pass_barrier(store: Any, world_size: int, *args: Any, **options: Any) -> None:
        barrier(store, world_size, *args, **options)
        with suppress(RuntimeError):  # the store has gone, and nobody waits for this node
            store.add(_LEFT, 1)
            deadline = time.monotonic() + _LEAVE_S
            while os.environ.get("SLURM_NODEID") == "0" and time.monotonic() < deadline:
                if store.add(_LEFT, 0) >= world_size:
                    break
                time.sleep(0.02)

    return pass_barrier


def _tell_of_kill(failures: Mapping[int, Any], before: int | None) -> None:
    """Print whether the kernel ended processes of this node, if a worker was killed.

    `failures` are those of torchrun's ChildFailedError.
    """
    killed = [rank for rank, failure in failures.items() if failure.exitcode in _KILLED]
    after = _ended_by_kernel()
    if not killed or before is None or after is None:
        return
    number = after - before
    what = f"{number or 'no'} process{'es' if number > 1 else ''} of this node"
    print(
        f"trnslurm: rank {killed[0]} was killed (KILL); since the launcher's start the kernel has "
        f"ended {what} for lack of memory{_memory_before()}",
        file=sys.stderr,
    )


def _ended_by_kernel() -> int | None:
    """Return how many processes of this node the kernel has ended for lack of memory.

    The kernel counts before it kills, those over a cgroup's limit too (__oom_kill_process in
    mm/oom_kill.c, since Linux 4.13).
    """
    with suppress(OSError):
        text = Path("/proc/vmstat").read_text(encoding="ascii")
        return int(found[1]) if (found := re.search(r"^oom_kill (\d+)$", text, re.M)) else None
    return None


def _memory_before() -> str:
    """Return how much memory was left shortly before, as this node noted it."""
    values = os.environ
    if not (run := values.get(Variable.RUN_DIR)):
        return ""
    line = last_line(RunFiles(Path(run)).usage_file(values.get("SLURM_NODEID", "0")))
    with suppress(KeyError, TypeError, ValueError):  # not noted, or damaged
        left, whole, at = (float(line[k]) for k in ("memory_left_gib", "memory_gib", "time"))
        if 0 <= (age_s := time.time() - at) < _NEWEST_S:
            return f" ({age_s:.0f} s before, {left:.1f} of {whole:.1f} GiB were free)"
    return ""


if __name__ == "__main__":
    code = run()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
