"""A custom job, named on the command line: a recipe without a file."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, Literal

from trnslurm.config.entry import Entry
from trnslurm.contract.files import open_file
from trnslurm.contract.rundir import PLAN
from trnslurm.devices import CPU, CUDA
from trnslurm.errors import ConfigError
from trnslurm.frozen import Frozen

Launcher = Literal[
    "trnslurm", "torchrun", "accelerate", "deepspeed", "srun", "python", "script", "job"
]
"""What starts a script: `python` and `script` once per node, `job` once on the first node, the
others once per worker."""
OWN_LAUNCHER: Launcher = "trnslurm"
"""trnslurm's own, trnslurm/node/launcher.py: the default."""

_HEAD_BYTES = 64 << 10
_PYTHON_FILE = r"(?<![^\s'\"])[\w./-]+\.py(?![^\s'\"])"
SCRIPT_HINT = (
    "a script is named by its path (./train.py), a module by -m, and any other command comes after "
    "--: trnslurm submit --nodes 2 -- trl sft --config sft.yaml"
)
"""How to start what is not a recipe."""


class Source(Frozen):
    """Where a recipe comes from."""

    path: Path
    """The directory of recipe.yaml; of a custom script its file; of another command the directory
    in which it is given."""
    command: Entry | None = None
    """A module or a program, instead of a file."""

    @property
    def has_file(self) -> bool:
        """Whether there is a recipe.yaml."""
        return self.command is None and self.path.is_dir()

    def tree(self) -> dict[str, Any]:
        """Return the content of the recipe that has no file."""
        if self.command is None:
            return script_tree(self.path)
        python = self.command.is_python
        return _tree(self.command, self.path, OWN_LAUNCHER if python else "script")


def is_script(word: str) -> bool:
    """Check whether a word names a script: recipes have names without a slash or a suffix."""
    if "/" in word:
        return True
    file = Path(word)
    return file.is_file() and (file.suffix in (".py", ".sh") or _batch_script(file)[0] > 0)


def refuse_batch_script(file: Path) -> None:
    """Refuse a script with options for sbatch: its commands would run on every node at once."""
    line, script = _batch_script(file)
    if not line:
        return
    where = f"{file}: a batch script (#SBATCH in line {line})"
    if (file.parent / PLAN).is_file():
        raise ConfigError(f"{where} of a bundle: trnslurm submit --rendered {file.parent}")
    raise ConfigError(
        f"{where}, which `sbatch {shlex.quote(str(file))}` runs as it is; trnslurm starts the "
        "training script itself, without srun or torchrun: "
        f"trnslurm submit {script} --nodes N --time TIME -- ARGUMENTS"
    )


def _batch_script(file: Path) -> tuple[int, str]:
    """Return the number of a file's first #SBATCH line, and the Python file that it starts.

    The number is 0 if sbatch would find no such line. It reads up to the first line that is neither
    empty nor a comment: https://slurm.schedmd.com/sbatch.html#SECTION_DESCRIPTION
    """
    try:
        with open_file(file) as stream:
            head = stream.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:  # whoever reads all of it says why
        return 0, ""
    lines = head.splitlines()
    commands = (n for n, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    first = next(commands, len(lines))
    found = next((n for n, line in enumerate(lines[:first], 1) if line.startswith("#SBATCH")), 0)
    started = re.search(_PYTHON_FILE, "\n".join(lines[first:]))
    name = started[0] if started and file.suffix != ".py" else "train.py"
    return found, name if "/" in name else f"./{name}"


def script_tree(file: Path, project: Path | None = None) -> dict[str, Any]:
    """Return the content of a recipe for the script.

    Its project is the directory from which it is started here, so that its relative paths mean the
    same there; or its own, if it lies elsewhere.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    refuse_batch_script(file)
    # Without "..", which would seem to be below this directory.
    entry, here = Path(os.path.abspath(file)), Path.cwd()  # noqa: PTH100
    root = (project or (here if entry.is_relative_to(here) else entry.parent)).absolute()
    if not entry.is_relative_to(root):
        raise ConfigError(f"{file} is not below its project {root}")
    found = Entry(str(entry.relative_to(root)))
    return _tree(found, root, OWN_LAUNCHER if found.is_python else "script")


def _tree(entry: Entry, project: Path, launcher: Launcher) -> dict[str, Any]:
    return {
        "entry": entry.text,
        "project": str(project),
        "launcher": launcher,
        # The graphs of a custom script are unknown.
        "default_cluster": "local",
        "precompile": "never",
        "devices": [CUDA.name, CPU.name],
    }
