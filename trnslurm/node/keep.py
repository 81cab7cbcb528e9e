"""Deletes older checkpoints of a script while it trains: its run keeps the newest of them.

    python -m trnslurm.node.keep --task=PID --last=N

It runs on the first node. Only whole checkpoints count, and only those in the run. What is deleted
gets a hidden name first, so that nobody takes half of it for a checkpoint.
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
    """Look until the task ends."""
    parser = argparse.ArgumentParser(prog="keep", allow_abbrev=False)
    parser.add_argument("--task", type=int, required=True, help="the process of node.sh")
    parser.add_argument("--last", type=int, required=True, help="how many to keep")
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
    """Delete the checkpoints that `last` newer ones make unnecessary."""
    for path in superseded(run, last):
        hidden = path.with_name(f"{_PREFIX}{path.name}")
        with suppress(FileNotFoundError):  # the script has deleted it
            path.rename(hidden)
            _remove(hidden)
            say(f"deleted {path.relative_to(run.path)}: {last} newer ones are whole (keep_last)")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
