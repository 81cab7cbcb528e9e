"""Finds a directory of this user that the nodes seem to share with this host.

A login node mounts the cluster's file systems like the nodes. ParallelCluster's head node has /home
on a local disk and exports it, so exported directories count too.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
EXPORTS = Path("/var/lib/nfs/etab")  # the current exports, from /etc/exports and other sources

# Types in /proc/self/mounts. Built for many nodes that write at once, so preferred.
_PARALLEL = {"lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "panfs", "orangefs"}
_NFS = {"nfs", "nfs4"}  # EFS and FSx for OpenZFS too


def find_shared() -> Path | None:
    """Return a directory that all nodes seem to share, or None."""
    home = Path.home()
    mounts = dict(_mounts())
    for place, kind in sorted(mounts.items()):
        if kind in _PARALLEL:
            own = place / getpass.getuser()
            if os.access(own if own.is_dir() else place, os.W_OK | os.X_OK):
                return own
    holder = next((p for p in (home, *home.parents) if p in mounts), Path("/"))
    if mounts.get(holder) in _PARALLEL | _NFS:
        return home
    return home if any(p in _exported() for p in (home, *home.parents)) else None


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield every mount point and its type; a later mount on the same point counts."""
    for line in _lines(MOUNTS):
        _, place, kind, *_ = line.split()
        yield Path(_unescaped(place)), kind


def _exported() -> set[Path]:
    return {Path(_unescaped(line.split()[0])) for line in _lines(EXPORTS) if line[:1] == "/"}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(word: str) -> str:
    r"""Return a path with escapes such as \040, a space, replaced."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
