"""What a worker that fails leaves in the run's state directory for whoever judges the attempt.

The directory is the batch script's: in a job started by hand there is none, and nothing is written.
"""

import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path

from trnslurm.rundir import RunFiles, write_json

_first_step: int | None = None
_step_begun: int | None = None


def begin_step(step: int) -> None:
    """Note which step this worker begins."""
    global _first_step, _step_begun
    _first_step = step if _first_step is None else _first_step
    _step_begun = step


def note_failure(error: Exception, line: str) -> None:
    """Record what this worker dies of; failures of that are ignored."""
    values = os.environ
    if "RANK" not in values:
        return  # no worker: torchrun tells each its rank
    files = RunFiles(Path(values.get("TRNSLURM_RUN_DIR", ".")))
    phase, rank = values.get("TRNSLURM_PHASE", "train"), values["RANK"]
    with suppress(OSError, ValueError):
        write_json(
            files.failed_file(phase, int(values.get("TRNSLURM_ATTEMPT", "1")), int(rank)),
            {
                "time": time.time(),
                "rank": int(rank),
                "node": int(values.get("GROUP_RANK", "0")),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "step": _step_begun,
                "steps_done": (_step_begun or 0) - (_first_step or 0),
                "raised": _raised(error),
                "error": line,
                "traceback": "".join(traceback.format_exception(error)),
            },
        )


def _raised(error: BaseException) -> list[str]:
    """Return the types of an exception and of those behind it, as a traceback names them.

    Behind it are also those that `from None` hides: what was an OSError may pass.
    """
    found: list[BaseException] = [error]
    for each in found:  # grows
        behind = (each.__cause__, each.__context__)
        found += [e for e in behind if e is not None and all(e is not known for known in found)]
    kinds = [(type(each).__module__, type(each).__qualname__) for each in found]
    plain = ("builtins", "__main__")
    return [name if module in plain else f"{module}.{name}" for module, name in kinds]
