"""What a worker leaves in the run's state directory for those who judge how an attempt ended.

    stopped-train-3.json         all workers have saved and ended because they were asked to
    failed-train-3-rank5.json    a worker dies of an exception
    stuck-train-3.json           who makes no progress, as the first that noticed has it

The directory is the batch script's: where there is none, as in a job started by hand, nothing is
written.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_step_begun: int | None = None


def begin_step(step: int) -> None:
    """Note which step (counted from 1) this worker goes on to."""
    global _step_begun
    _step_begun = step


def write_record(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole, in the place of one that is there."""
    with suppress(FileNotFoundError), _written(path, values) as temporary:
        temporary.rename(path)


def write_first(path: Path, values: dict[str, Any]) -> bool:
    """Write a file whole unless there is one; tell whether this was the first."""
    try:
        with _written(path, values) as temporary:
            path.hardlink_to(temporary)
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk: then whoever sees it says so
    return True


@contextmanager
def _written(path: Path, values: dict[str, Any]) -> Iterator[Path]:
    """Give a file beside the path that has the values already, for the block to put there."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(values) + "\n", encoding="utf-8")
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def note_failure(error: Exception, line: str) -> None:
    """Leave a record of what this worker dies of; whatever goes wrong with that is no news."""
    values = os.environ
    if "RANK" not in values:
        return  # no worker: torchrun tells each its rank
    attempt, rank = values.get("TRNSLURM_ATTEMPT", "1"), values["RANK"]
    state = Path(values.get("TRNSLURM_RUN_DIR", "."), "state")
    name = f"failed-{values.get('TRNSLURM_PHASE', 'train')}-{attempt}-rank{rank}.json"
    with suppress(OSError, ValueError):
        write_record(
            state / name,
            {
                "time": time.time(),
                "rank": int(rank),
                "node": int(values.get("GROUP_RANK", "0")),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "step": _step_begun,
                "error": line,
                "traceback": "".join(traceback.format_exception(error)),
            },
        )
