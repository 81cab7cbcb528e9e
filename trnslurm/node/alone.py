"""Finds out whether the workers of a training never joined, so that each has trained alone.

sitecustomize.py has worker 0 tell at its end. PyTorch forgets a process group that was destroyed,
but not how the default one was opened.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable

# How the workers join that use one of these; all others must call init_process_group.
_JOINS = {
    "lightning.pytorch": "Lightning's Trainer needs num_nodes={nodes}, devices={per_node}",
    "pytorch_lightning": "Lightning's Trainer needs num_nodes={nodes}, devices={per_node}",
    "xla": "the backend xla joins them on Neuron devices, not on CPUs",
}


def tell() -> None:
    """Record the number of workers, if this one is the first of several and was alone."""
    values = os.environ
    if values.get(Variable.PHASE) != "train" or not is_alone():
        return
    files = RunFiles(Path(values[Variable.RUN_DIR]))
    with suppress(OSError):
        write_json(
            files.alone_file("train", int(values[Variable.ATTEMPT])),
            {
                "workers": int(values["WORLD_SIZE"]),
                "per_node": int(values.get("LOCAL_WORLD_SIZE", "1")),
                "uses": _backend() or next((name for name in _JOINS if name in sys.modules), ""),
            },
        )


def is_alone() -> bool:
    """Check whether this process uses PyTorch, and has never shared a process group."""
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if group is None:
        return False
    backend = _backend()
    if backend == "xla":  # its CPU client knows no other process
        return os.environ.get("PJRT_DEVICE") == "CPU"
    return not backend and getattr(group, "_default_pg_init_method", "") is None


def _backend() -> str:
    """Return the backend of the default process group; empty: none was opened.

    init_process_group sets it, and destroy_process_group keeps it (torch 2.9, 2.13).
    """
    group = sys.modules.get("torch.distributed.distributed_c10d")
    backend = getattr(group, "_backend", "")
    return "" if backend in (None, "undefined") else str(backend)


def reason(run: RunFiles, attempt: int) -> str:
    """Return what the workers of a training lacked, in words; empty: nothing, as far as known."""
    told = read_json(run.alone_file("train", attempt))
    workers, per_node = told.get("workers"), told.get("per_node")
    if not isinstance(workers, int) or not isinstance(per_node, int):
        return ""
    joins = _JOINS.get(str(told.get("uses")), "torch.distributed.init_process_group was not called")
    how = joins.format(nodes=workers // per_node, per_node=per_node)
    return f"its {workers} workers shared no process group, so each worked alone: {how}"
