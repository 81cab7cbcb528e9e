"""Finds out whether the workers of a training never joined, so that each has trained alone.

sitecustomize.py has worker 0 tell at its end. PyTorch forgets a process group that was destroyed,
but not how the default one was opened.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from trnslurm.rundir import RunFiles, read_json, write_json


def tell() -> None:
    """Record the number of workers, if this one is the first of several and was alone."""
    values = os.environ
    if values.get("TRNSLURM_PHASE") != "train" or not is_alone():
        return
    files = RunFiles(Path(values["TRNSLURM_RUN_DIR"]))
    with suppress(OSError):
        write_json(
            files.alone_file("train", int(values["TRNSLURM_ATTEMPT"])),
            {"workers": int(values["WORLD_SIZE"])},
        )


def is_alone() -> bool:
    """Check whether this process uses PyTorch, and has never shared a process group."""
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if group is None:
        return False
    # Both are set by init_process_group, and kept by destroy_process_group (torch 2.9, 2.13).
    backend = getattr(group, "_backend", "")
    if backend == "xla":  # its CPU client knows no other process
        return os.environ.get("PJRT_DEVICE") == "CPU"
    unset = backend in (None, "undefined")
    return unset and getattr(group, "_default_pg_init_method", "") is None


def reason(run: RunFiles, attempt: int) -> str:
    """Return what the workers of a training lacked, in words; empty: nothing, as far as known."""
    workers = read_json(run.alone_file("train", attempt)).get("workers")
    if not isinstance(workers, int):
        return ""
    return f"its {workers} workers shared no process group: each worked alone"
