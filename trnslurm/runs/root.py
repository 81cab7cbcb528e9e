"""Creates run directories in a run root whose path and permissions are safe."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from trnslurm.errors import RunError
from trnslurm.records.foreign import is_ours
from trnslurm.records.run import RunDir

_POLL_S = 0.1
# A colon would split PYTHONPATH. A percent sign is a placeholder in file patterns of submitit and
# Slurm, and a backslash stops Slurm from replacing placeholders. Bytes that are not UTF-8 arrive as
# surrogates, which no record can hold.
_BAD_PATH = r"[:%\\\x00-\x1f\x7f\ud800-\udfff]"


def check_run_root(root: Path) -> Path:
    """Return the absolute run root. Reject a path that would break the scripts."""
    if re.match(r"\$\w|\$\{", str(root)):
        raise RunError(f"run root {str(root)!r}: variables are not expanded (only ~ is)")
    absolute = root.expanduser().absolute()
    if re.search(_BAD_PATH, str(absolute)):
        raise RunError(
            f"run root {str(absolute)!r}: a colon, a percent sign, a backslash, a control "
            "character or a byte that is not UTF-8 in the path would break the scripts: choose "
            "another run_root"
        )
    return absolute


def time_stamp() -> str:
    """Return the current time in UTC as a prefix for run names, so that the newest sorts last."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def free_stamp(root: Path, names: Sequence[str]) -> str:
    """Return a time stamp for the names of new runs. Wait a second if a name is taken."""
    while any((root / f"{(stamp := time_stamp())}-{name}").exists() for name in names):
        time.sleep(_POLL_S)
    return stamp


def create_run(root: Path, name: str, *, group_readable: bool = False, stamp: str = "") -> RunDir:
    """Create a private run directory whose name begins with `stamp` (default: the time now)."""
    top = Path(*root.parts[:2])
    if not top.exists():  # a file system that is not mounted: as root, mkdir would fill its place
        raise RunError(
            f"run root {root}: {top} does not exist on this host: submit from a host that has it, "
            "or pass --set run_root=DIR"
        )
    try:
        root.mkdir(mode=0o750 if group_readable else 0o700, parents=True, exist_ok=True)
        info = root.stat()
        if group_readable and info.st_uid == os.getuid() and not info.st_mode & stat.S_IXGRP:
            root.chmod(info.st_mode | 0o050)  # made by an earlier, private run
        if not is_ours(root):
            raise RunError(
                f"run root {root} belongs to another user, who could replace its files: choose "
                "another run_root"
            )
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            raise RunError(
                f"every user can write to the run root {root}: run chmod o-w or chmod o+t on it"
            )
        stem = f"{stamp or time_stamp()}-{name}"
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            path = root / f"{stem}{suffix}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            if group_readable:  # the run root's group, if its setgid bit passes that on
                path.chmod(0o750 | (path.stat().st_mode & stat.S_ISGID))
            return RunDir(path)
    except OSError as error:
        raise RunError(
            f"run root {root}: {error.strerror}: set run_root in the cluster profile, or pass "
            "--set run_root=DIR"
        ) from None
    raise RunError(f"{root / stem}: too many runs started in this second")
