"""The git commit of a run's code, and its uncommitted changes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GIT_TIMEOUT_S = 20
_MAX_PATCH_MIB = 16


def git_source(directory: Path) -> tuple[Mapping[str, Any], bytes]:
    """Return a directory's git commit, and its uncommitted changes as a patch.

    Both are empty outside a repository. A patch that is too large is dropped.
    """
    # https://git-scm.com/docs/git-status#_porcelain_format_version_2
    output = _git(directory, "status", "--porcelain=v2", "--branch") or b""
    lines = output.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if commit in ("", "(initial)"):
        return {}, b""
    changes = [line for line in lines if not line.startswith("#")]
    patch = _patch(directory) if any(line[0] not in "?!" for line in changes) else b""
    return {"commit": commit, "dirty": bool(changes)}, patch


def _patch(directory: Path) -> bytes:
    # A run's code has no hidden files, such as .env, so the patch has none either.
    paths = ("--", ":(top)", ":(top,exclude,glob)**/.*", ":(top,exclude,glob)**/.*/**")
    patch = _git(directory, "diff", "--binary", "--no-ext-diff", "HEAD", *paths) or b""
    return patch if len(patch) <= _MAX_PATCH_MIB * 2**20 else b""


def _git(directory: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
