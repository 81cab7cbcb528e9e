"""Writes down what a worker does with the files of checkpoints, and when.

disk-RANK.jsonl has a line for each file opened for writing, each fsync and each rename, with the
seconds of the monotonic clock, which all processes of a machine share.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from trnslurm.train.environment import Environment
from trnslurm.train.loop.reports import JsonLines


def note_disk(environment: Environment) -> None:
    """Begin to write down what this process does."""
    root = (environment.run_dir / "checkpoints").resolve()
    lines = JsonLines(environment.run_dir / "drill" / f"disk-{environment.rank}.jsonl")
    fsync = os.fsync

    def note(what: str, path: Any, **more: Any) -> None:
        real = Path(path).resolve()
        if real.is_relative_to(root):
            lines.write({"time": time.monotonic(), "what": what, "path": str(real), **more})

    def fsync_and_note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        fsync(descriptor)
        note("fsync", path)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            note("write", args[0])
        elif event == "os.mkdir":
            note("mkdir", args[0])
        elif event == "os.rename":
            note("rename", args[0], to=str(Path(args[1]).resolve()))

    os.fsync = fsync_and_note
    sys.addaudithook(audit)
