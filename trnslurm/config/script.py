"""A custom job given on the command line: a recipe without a file."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from trnslurm.config.batch_script import (
    BatchScript,
    first_directive,
    is_batch_script,
    read_batch_script,
)
from trnslurm.config.entry import Entry
from trnslurm.contract.rundir import PLAN
from trnslurm.devices import DEVICES, DeviceType
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

Launcher = Literal[
    "trnslurm", "torchrun", "accelerate", "deepspeed", "srun", "python", "script", "job", "ray"
]
"""What starts a script: `python` and `script` once per node; `job` once, on the first node; `ray`
likewise, as the driver of a Ray cluster that spans all nodes; the others once per worker."""
OWN_LAUNCHER: Launcher = "trnslurm"
"""The default launcher, trnslurm's own: trnslurm/node/launcher.py."""

_MOST_READ = 1 << 20
SCRIPT_HINT = (
    "name a script by its path (./train.py), a module with -m, and put any other command after "
    "--: trnslurm submit --nodes 2 -- trl sft --config sft.yaml"
)
"""How to start something that is not a recipe."""


class Source(Frozen):
    """Where a recipe comes from."""

    path: Path
    """The directory of recipe.yaml; for a custom script its file; for another command the directory
    in which it was given."""
    command: Entry | None = None
    """A module or a program, instead of a file."""

    @property
    def has_file(self) -> bool:
        """Whether there is a recipe.yaml."""
        return self.command is None and self.path.is_dir()

    def tree(self) -> dict[str, Any]:
        """Return the content of a recipe that has no file."""
        if self.command is None:
            return script_tree(self.path)
        python = self.command.is_python
        return _tree(self.command, self.path, OWN_LAUNCHER if python else "script")


def is_script(word: str) -> bool:
    """Check whether a word names a script; recipe names have no slash or suffix."""
    if "/" in word:
        return True
    file = Path(word)
    return file.is_file() and (file.suffix in (".py", ".sh") or is_batch_script(file))


def batch_script(word: str) -> BatchScript | None:
    """Return the batch script that a word on the command line names, if it names one."""
    file = Path(word)
    if not is_script(word) or not is_batch_script(file) or (file.parent / PLAN).is_file():
        return None
    return read_batch_script(file)


def refuse_batch_script(file: Path) -> None:
    """Reject a script with sbatch options where nothing would read them.

    Also, its commands would run on every node at once.
    """
    if line := first_directive(file):
        raise ConfigError(
            f"{file}: this is a batch script (#SBATCH in line {line}). Use trnslurm submit "
            f"{shlex.quote(str(file))} to run it once, with its own options"
        )


def script_tree(file: Path, project: Path | None = None) -> dict[str, Any]:
    """Return the content of a recipe for the script.

    Its project is the current directory, so that relative paths keep their meaning. If the script
    lies elsewhere, its project is the script's own directory.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    # Without "..", which would look like a path under this directory.
    entry, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100
    root = (project or (here if entry.is_relative_to(here) else entry.parent)).absolute()
    if not entry.is_relative_to(root):
        raise ConfigError(f"{file} is not inside its project {root}")
    found = Entry(str(entry.relative_to(root)))
    if is_batch_script(file):
        return _batch_tree(found, root, file)
    return _tree(found, root, OWN_LAUNCHER if found.is_python else "script")


def _tree(entry: Entry, project: Path, launcher: Launcher) -> dict[str, Any]:
    source = source_of(entry, project)
    return {
        "entry": entry.text,
        "project": str(project),
        "launcher": launcher,
        # The graphs of a custom script are unknown.
        "default_cluster": "local",
        "precompile": "never",
        "devices": [name for name, device in DEVICES.items() if _suits(device, source)],
    }


def _suits(device: DeviceType, source: str) -> bool:
    """Check whether a script's source imports what a device needs."""
    needs = "|".join(map(re.escape, device.imports))
    return not needs or bool(re.search(rf"(?m)^\s*(?:from|import)\s+(?:{needs})\b", source))


def source_of(entry: Entry, project: Path) -> str:
    """Return the source of a script or of a module in the project; empty if it is elsewhere."""
    path = entry.name.replace(".", "/") if entry.is_module else entry.name
    files = (f"{path}.py", f"{path}/__main__.py", f"src/{path}.py") if entry.is_module else (path,)
    found = (file for name in files if entry.is_python and (file := project / name).is_file())
    with suppress(OSError), next(found, Path()).open(errors="replace") as stream:
        return stream.read(_MOST_READ)
    return ""


def _batch_tree(entry: Entry, project: Path, file: Path) -> dict[str, Any]:
    """Return the content of the recipe that runs a batch script."""
    if (file.parent / PLAN).is_file():
        raise ConfigError(
            f"{file}: this batch script belongs to a bundle: use trnslurm submit --rendered "
            f"{file.parent}"
        )
    script = read_batch_script(file)
    runs_in = Path(os.path.abspath(project / script.directory))  # noqa: PTH100
    if (root := _reached(runs_in, script.levels_up)) and project.is_relative_to(root):
        entry, project = Entry(str((project / entry.name).relative_to(root))), root
    options = ["--given"]
    if script.signal:
        options.append(f"--signal={script.signal}")
    if script.tasks:
        options.append(f"--array={','.join(map(str, script.tasks))}")
    if runs_in != project:
        below = runs_in.is_relative_to(project)
        options.append(f"--directory={runs_in.relative_to(project) if below else runs_in}")
    return _tree(entry, project, "job") | {
        "launcher_arguments": options,
        "devices": [],  # the script knows what its nodes have
        "slurm": {**script.slurm, "directives": [*script.kept]},
    }


def _reached(directory: Path, levels: int) -> Path | None:
    """Return the directory this many levels up, unless it is a home directory or contains one."""
    root = directory.parents[levels - 1] if 0 < levels <= len(directory.parents) else directory
    return None if root in (Path.home(), *Path.home().parents) else root
