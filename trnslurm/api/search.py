"""Where to look: the search path of recipes and profiles, and the run roots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trnslurm.config.search import RUN_ROOT, Workspace, read_yaml
from trnslurm.errors import TrnslurmError
from trnslurm.runs.find import known_roots
from trnslurm.sandbox.layout import search_roots

Options = Mapping[str, Any]
"""What was asked for, by the names of the command line's parameters."""


def workspace_of(options: Options) -> Workspace:
    """Return the search path that the options ask for."""
    return Workspace.discover(options.get("path") or (), more=search_roots())


def run_roots(workspace: Workspace) -> list[Path]:
    """Return where to look for runs: run roots used before, and those of known profiles."""
    roots = known_roots()
    for file in workspace.clusters().values():
        try:
            root = read_yaml(file).get("run_root", RUN_ROOT)
            roots.append(Path(str(root)).expanduser())
        except (TrnslurmError, RuntimeError):  # ~name of nobody
            continue
    # Unlike Path.is_dir, it is False for what can be no path at all.
    return [r for r in dict.fromkeys(roots) if os.path.isdir(r)]  # noqa: PTH112
