"""Deletes a script's older checkpoints while it trains, so that its run keeps the newest ones.

    python -m trnslurm.node.keep --task=PID --last=N

It runs on the first node. Only complete checkpoints count, and only those in the run. A checkpoint
gets a hidden name before it is deleted, so that nobody uses a half-deleted one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.checkpoints import superseded
from trnslurm.contract.rundir import RunFiles
from trnslurm.node.guard import Watched
from trnslurm.node.processes import say
from trnslurm.node.state import RUN

_EVERY_S = 15.0
_PREFIX = ".removed-"


def main() -> int:
    """Check regularly until the task ends."""
    parser = argparse.ArgumentParser(prog="keep", allow_abbrev=False)
    parser.add_argument("--task", type=int, required=True, help="the node.sh process")
    parser.add_argument("--last", type=int, required=True, help="number of checkpoints to keep")
    options = parser.parse_args()
    with suppress(OSError):
        os.nice(10)
    task = Watched(options.task)
    while not task.ends_within(_EVERY_S):
        try:
            keep(RUN, options.last)
        except Exception:  # the script's own files, as it likes
            say(traceback.format_exc())
    return 0


def keep(run: RunFiles, last: int) -> None:
    """Delete checkpoints when `last` newer ones are complete."""
    for path in superseded(run, last):
        hidden = path.with_name(f"{_PREFIX}{path.name}")
        with suppress(FileNotFoundError):  # the script has deleted it
            path.rename(hidden)
            _remove(hidden)
            say(
                f"deleted {path.relative_to(run.path)}: {last} newer checkpoints are complete "
                "(keep_last)"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
