"""torchrun, but its process ends at once, and reports whether the kernel killed a worker.

    python -m trnslurm.node.torchrun --nnodes=2 … train.py …

Python takes a third of a second to tear PyTorch down. srun first waits for the failed node and then
ends the others, so the next attempt would wait for this twice.

The first node has the store in which the nodes meet after training. It ends after the others.
Otherwise, these would print that the connection was closed, although the run completed.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.utils import store as store_util
from torch.distributed.run import main

from trnslurm.node.killed import ended_by_kernel, tell_of_kill

_LEAVE_S = 5.0
_LEFT = "trnslurm/left"


def run() -> int:
    """Run torchrun; return its exit code."""
    before = ended_by_kernel()
    store_util.barrier = _leave_last(store_util.barrier)
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        failures = getattr(error, "failures", {})  # from torchrun's ChildFailedError
        tell_of_kill({rank: failure.exitcode for rank, failure in failures.items()}, before)
        return 1
    return 0


def _leave_last(barrier: Callable[..., None]) -> Callable[..., None]:
    """Return torchrun's barrier, after which the first node waits for the others to pass it.

    Only _exit_barrier in torch.distributed.elastic.agent.server.api calls the barrier.
    """

    def pass_barrier(store: Any, world_size: int, *args: Any, **options: Any) -> None:
        barrier(store, world_size, *args, **options)
        with suppress(RuntimeError):  # the store is gone, and no node waits for this one
            store.add(_LEFT, 1)
            deadline = time.monotonic() + _LEAVE_S
            while os.environ.get("SLURM_NODEID") == "0" and time.monotonic() < deadline:
                if store.add(_LEFT, 0) >= world_size:
                    break
                time.sleep(0.02)

    return pass_barrier


if __name__ == "__main__":
    code = run()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
