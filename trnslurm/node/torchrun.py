"""torchrun, but its process ends at once.

    python -m trnslurm.node.torchrun --nnodes=2 … train.py …

Python takes a third of a second to tear PyTorch down. srun ends the nodes after the one that failed
first, so that the next attempt waits for it twice.
"""

import atexit
import os
import sys
from contextlib import suppress

from torch.distributed.run import main


def run() -> int:
    """Run torchrun; return its exit code."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    code = run()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
