"""Detects workers that never joined each other, so that each trains its own copy.

sitecustomize.py makes worker 0 report while it works and when it ends. PyTorch forgets a process
group that was destroyed, but not how the default group was initialized.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.files import last_line, read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.variables import Variable

PERIOD_S = 20.0
WITHOUT_STEPS_S = 300.0
"""How long worker 0 works without a group before it reports this, if no step is known.

Most scripts initialize their group before they load data. Some first prepare data on worker 0.
"""
_WORKS_AT_CPU_S = 60.0
"""More processor time than imports of large libraries take."""
# How workers that use one of these join. All others must call init_process_group.
_JOINS = {
    "lightning.pytorch": "Lightning's Trainer needs num_nodes={nodes}, devices={per_node}",
    "pytorch_lightning": "Lightning's Trainer needs num_nodes={nodes}, devices={per_node}",
    "one": "each worker has initialized its own group, which happens if the MPI does not support "
    "Slurm: use an MPI with PMIx or PMI2, or torchrun",
    "xla": "the backend xla joins them on Neuron devices, not on CPUs",
}
_CALL = "torch.distributed.init_process_group"
# Libraries that connect workers without PyTorch's default process group.
_OTHER_WAYS = {"horovod", "jax", "mpi4py", "ray", "torchft"}
_seen_connected = False
"""Whether a connection was ever seen. Processes close their connections before this one ends."""


def tell() -> None:
    """Record the number of workers if this is the first of several and it was alone."""
    values = os.environ
    one = has_group_of_one()
    if values.get(Variable.PHASE) != "train" or not (one or (is_alone() and not _is_connected())):
        return
    library = next((name for name in _JOINS if name in sys.modules), "")
    with suppress(OSError):
        write_json(
            _file(),
            {
                "workers": int(_at_start("WORLD_SIZE")),
                "per_node": int(_at_start("LOCAL_WORLD_SIZE") or "1"),
                "uses": "one" if one else _backend() or library,
            },
        )


def watch() -> None:
    """Report that worker 0 is alone while it works, until it has joined the others."""
    if os.environ.get(Variable.PHASE) == "train":
        looks = Looks()
        while looks.go_on(time.monotonic(), time.process_time()):
            time.sleep(PERIOD_S)


class Looks:
    """What worker 0 has reported so far."""

    def __init__(self) -> None:
        self._works_since: float | None = None
        self._told = False

    def go_on(self, now: float, cpu_s: float) -> bool:
        """Look once. Return False if worker 0 has joined the others, or may have."""
        if has_group_of_one():
            tell()
            self._told = True
            return True
        if is_alone():
            if not self._told and not self._trains(now, cpu_s):
                return True
            if not _is_connected():
                if not self._told:
                    tell()
                self._told = True
                return True
        elif not _has_group() and _OTHER_WAYS.isdisjoint(sys.modules):
            return True  # PyTorch is not imported yet
        if self._told:
            with suppress(OSError):
                _file().unlink()
        return False

    def _trains(self, now: float, cpu_s: float) -> bool:
        """Check whether a step is known or worker 0 has worked for long."""
        step = last_line(_run().metrics_file)
        if step.get("attempt") == int(os.environ[Variable.ATTEMPT]):
            return True
        uses_gpu = getattr(sys.modules.get("torch.cuda"), "_initialized", False)
        if self._works_since is None and (uses_gpu or cpu_s >= _WORKS_AT_CPU_S):
            self._works_since = now
        return self._works_since is not None and now - self._works_since >= WITHOUT_STEPS_S


def is_alone() -> bool:
    """Check whether this process uses PyTorch and has never shared a process group."""
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if group is None or not _OTHER_WAYS.isdisjoint(sys.modules):
        return False
    backend = _backend()
    if backend == "xla":  # its CPU client does not know other processes
        return os.environ.get("PJRT_DEVICE") == "CPU"
    return not backend and getattr(group, "_default_pg_init_method", "") is None


def has_group_of_one() -> bool:
    """Check whether the default process group has only this worker although several were started.

    A script may get its rank from another library, such as mpi4py, which does not know the others.
    """
    group = sys.modules.get("torch.distributed.distributed_c10d")
    if group is None or not (_OTHER_WAYS - {"mpi4py"}).isdisjoint(sys.modules):
        return False
    with suppress(Exception):  # torch's own, as of 2.9 and 2.13
        return bool(group._world.default_pg.size() == 1) and _at_start("WORLD_SIZE") not in (
            "",
            "1",
        )
    return False


def _at_start(name: str) -> str:
    """Return a variable's value at the start of this process, because a script may change it."""
    with suppress(OSError):
        words = Path("/proc/self/environ").read_bytes().split(b"\0")
        prefix = f"{name}=".encode()
        if found := [word[len(prefix) :] for word in words if word.startswith(prefix)]:
            return found[-1].decode(errors="replace")
    return os.environ.get(name, "")


def _has_group() -> bool:
    group = sys.modules.get("torch.distributed.distributed_c10d")
    return bool(_backend() or getattr(group, "_default_pg_init_method", None))


def _backend() -> str:
    """Return the backend of the default process group, or an empty string if there was no group."""
    group = sys.modules.get("torch.distributed.distributed_c10d")
    backend = getattr(group, "_backend", "")
    return "" if backend in (None, "undefined") else str(backend)


def _is_connected() -> bool:
    """Check whether this process or a descendant may be connected to other workers."""
    global _seen_connected
    if _backend() == "xla":  # the store connects them, but XLA's CPU client does not
        return False
    from trnslurm.node import connections, processes

    pids = [os.getpid(), *processes.descendants()]
    _seen_connected = _seen_connected or connections.are_there(pids)
    return _seen_connected


def _run() -> RunFiles:
    return RunFiles(Path(os.environ[Variable.RUN_DIR]))


def _file() -> Path:
    return _run().alone_file("train", int(os.environ[Variable.ATTEMPT]))


def reason(run: RunFiles, attempt: int) -> str:
    """Return why the workers did not train together, or an empty string if no problem is known."""
    workers, nodes, joins = _told(run, attempt)
    how = joins or f"they did not call {_CALL}"
    what = f"its {workers} workers shared no process group, so each worked alone: {how}"
    return what if nodes else ""


def so_far(run: RunFiles, attempt: int) -> str:
    """Return that the workers of a running job are alone and what to do; empty if they are not."""
    workers, nodes, joins = _told(run, attempt)
    how = joins or f"call {_CALL} in the script"
    fewer = ["--nodes 1"] * (nodes > 1) + ["--workers 1"] * (workers > nodes)
    what = (
        f"its {workers} workers share no process group so far, so each trains alone: {how}, "
        f"or submit it with {' '.join(fewer)}, or with --per node if it starts its own workers"
    )
    return what if nodes else ""


def _told(run: RunFiles, attempt: int) -> tuple[int, int, str]:
    """Return the numbers of workers and nodes and how a library joins them; zeros if unknown."""
    told = read_json(run.alone_file("train", attempt))
    workers, per_node = told.get("workers"), told.get("per_node")
    if not isinstance(workers, int) or not isinstance(per_node, int):
        return 0, 0, ""
    nodes = workers // per_node
    joins = _JOINS.get(str(told.get("uses")), "")
    return workers, nodes, joins.format(nodes=nodes, per_node=per_node)
