"""Neuron's locks in a cache: all later compilers wait forever for the lock of a killed one.

Locks are empty files that do not name their owner. So a lock is removed only if one of our compiles
recorded that it left the lock and has ended. All other locks are listed with their age.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from trnslurm.contract.files import write_json
from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import user_name
from trnslurm.node.graphs.neuron import GRAPH

LOCK = f"{GRAPH}.lock"


class Lock(Frozen):
    """A lock at one moment. If another process takes the lock again, its mtime differs."""

    path: Path
    mtime_ns: int
    uid: int

    def __str__(self) -> str:
        hours = (time.time() - self.mtime_ns / 1e9) / 3600
        return f"{self.path} ({user_name(self.uid)}, {hours:.1f} h old)"


def locks_of(graphs: Collection[str]) -> Iterator[Lock]:
    """Yield the locks in these graphs' directories, if the directories are on this host."""
    for graph in sorted(graphs):
        path = Path(graph) / LOCK
        if path.is_absolute() and (lock := _look(path)):
            yield lock


def all_locks(cache: Path) -> Iterator[Lock]:
    """Yield every lock in a cache."""
    for pattern in ("neuronxcc-*", "hosts/*/neuronxcc-*"):
        for path in sorted(cache.glob(f"{pattern}/*/{LOCK}")):
            if lock := _look(path):
                yield lock


class HeldLocks:
    """Records which locks a compile holds and may leave behind, for the next compile of its key."""

    def __init__(self, cache: Path, key_directory: Path, taker: dict[str, Any]) -> None:
        self._before = set(all_locks(cache))
        self._taker = taker
        self._file = key_directory / "left" / f"{taker['job']}-node{taker['node']}.json"
        self._noted: list[Lock] = []

    def note(self, graphs: Collection[str]) -> None:
        """Record this user's locks of these graphs that did not exist before the compile."""
        held = [lock for lock in locks_of(graphs) if lock not in self._before]
        held = [lock for lock in held if lock.uid == os.getuid()]
        if held != self._noted:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            locks = [{"path": str(lock.path), "mtime_ns": lock.mtime_ns} for lock in held]
            write_json(self._file, self._taker | {"locks": locks})
            self._noted = held


def clear_stale(key_directory: Path, has_ended: Callable[[dict[str, Any]], bool]) -> Iterator[Lock]:
    """Remove the locks left by compiles that have ended, and yield them."""
    for note in sorted((key_directory / "left").glob("*.json")):
        try:
            if note.stat().st_uid != os.getuid():
                continue
            taker = json.loads(note.read_text(encoding="utf-8"))
            left = {(Path(lock["path"]), lock["mtime_ns"]) for lock in taker["locks"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not has_ended(taker):
            continue
        for path, mtime_ns in sorted(left):
            lock = _look(path)
            # Only our lock, unchanged: if another process took it since, its time differs.
            if path.name == LOCK and lock and (lock.mtime_ns, lock.uid) == (mtime_ns, os.getuid()):
                path.unlink(missing_ok=True)
                yield lock
        note.unlink(missing_ok=True)


def _look(path: Path) -> Lock | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return Lock(path=path, mtime_ns=status.st_mtime_ns, uid=status.st_uid)
