"""The search path of recipes and profiles, and the run roots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trnslurm.config.search import RUN_ROOT, Workspace, read_yaml
from trnslurm.errors import TrnslurmError
from trnslurm.runs.find import known_roots
from trnslurm.sandbox.layout import search_roots


def workspace_of(path: Sequence[str] = ()) -> Workspace:
    """Return the search path, with the directories of --path first."""
    return Workspace.discover(path, more=search_roots())


def run_roots(workspace: Workspace) -> list[Path]:
    """Return the run roots: those used before, and those in known profiles."""
    roots = known_roots()
    for file in workspace.clusters().values():
        try:
            root = read_yaml(file).get("run_root", RUN_ROOT)
            roots.append(Path(str(root)).expanduser())
        except (TrnslurmError, RuntimeError):  # ~name of an unknown user
            continue
    # Unlike Path.is_dir, it is False for a text that cannot be a path.
    return [r for r in dict.fromkeys(roots) if os.path.isdir(r)]  # noqa: PTH112
