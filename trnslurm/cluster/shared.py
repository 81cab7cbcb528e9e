"""Finds a directory of one's own that this host shares with the nodes, as far as a host can tell.

A login node mounts the cluster's file systems as the nodes do. On ParallelCluster the head node has
/home on a disk of its own and exports it, so what is exported counts too.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
EXPORTS = Path("/var/lib/nfs/etab")  # what exportfs exports now, from /etc/exports and elsewhere

# As /proc/self/mounts names them. Made for many nodes that write at once, so preferred.
_PARALLEL = {"lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "panfs", "orangefs"}
_NFS = {"nfs", "nfs4"}  # EFS and FSx for OpenZFS too


def find_shared() -> Path | None:
    """Return a directory below which files are on all nodes, or None if this host shows none."""
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
    """Yield every mount point and its type; of several on one place the last one counts."""
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
    r"""Return a path in which a space is not \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)
