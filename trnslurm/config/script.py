"""A custom training script, named on the command line: a recipe without a file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from trnslurm.errors import ConfigError

Launcher = Literal["torchrun", "accelerate", "deepspeed", "srun", "python", "script"]
"""What starts a custom script: the first four once per worker, the others once per node."""

_NO_NAME = r"[^A-Za-z0-9._-]+"


def is_script(word: str) -> bool:
    """Check whether a word names a script: recipes have names without a slash or a suffix."""
    return "/" in word or (Path(word).suffix in (".py", ".sh") and Path(word).is_file())


def script_name(file: Path) -> str:
    """Return the name of a custom script's recipe."""
    return re.sub(_NO_NAME, "-", file.stem).strip("-.")[:40] or "script"


def script_tree(file: Path, project: Path | None = None) -> dict[str, Any]:
    """Return the content of a recipe for the script.

    Its project is the directory from which it is started here, so that its relative paths mean the
    same there; or its own, if it lies elsewhere.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    # Without "..", which would seem to be below this directory.
    entry, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100
    root = (project or (here if entry.is_relative_to(here) else entry.parent)).absolute()
    if not entry.is_relative_to(root):
        raise ConfigError(f"{file} is not below its project {root}")
    python = file.suffix == ".py"
    return {
        "entry": str(entry.relative_to(root)),
        "project": str(root),
        "launcher": "torchrun" if python else "script",
        # The graphs of a custom script are unknown.
        "default_cluster": "local",
        "precompile": "never",
        "devices": ["cuda", "cpu"],
    }
