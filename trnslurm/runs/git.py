"""Where the code of a run came from: git commit and uncommitted changes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GIT_TIMEOUT_S = 20
_MAX_PATCH_MIB = 16


def git_state(directory: Path) -> Mapping[str, Any]:
    """Return the commit that a directory is at, empty outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    return {
        "commit": commit.decode().strip(),
        "dirty": bool(_git(directory, "status", "--porcelain")),
    }


def git_patch(directory: Path) -> bytes:
    """Return the uncommitted changes, empty if there are none or they are huge."""
    # Hidden files, such as .env, are no part of a run's code either.
    paths = ("--", ":(top)", ":(top,exclude,glob)**/.*", ":(top,exclude,glob)**/.*/**")
    patch = _git(directory, "diff", "--binary", "--no-ext-diff", "HEAD", *paths) or b""
    return patch if len(patch) <= _MAX_PATCH_MIB * 2**20 else b""


def _git(directory: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True, timeout=_GIT_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
