"""What a custom job starts: a file of its project, a module, or a program on the nodes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from trnslurm.frozen import Frozen

_MODULE, _PROGRAM = "-m ", "-- "
_NO_NAME = r"[^A-Za-z0-9._-]+"
# Parts of a module's name that carry no meaning: `torchtitan.train` is called torchtitan.
_GENERAL = frozenset({"__main__", "cli", "main", "run", "scripts", "train"})


class Entry(Frozen, kw_only=False):
    """The key `entry`: the path of a file, `-m MODULE`, or `-- PROGRAM`."""

    text: str

    @classmethod
    def module(cls, name: str) -> Entry:
        """Return the entry for a module that the Python interpreter on the nodes can import."""
        return cls(f"{_MODULE}{name}")

    @classmethod
    def program(cls, name: str) -> Entry:
        """Return the entry for a program that is on the nodes' PATH or has an absolute path."""
        return cls(f"{_PROGRAM}{name}")

    @property
    def is_module(self) -> bool:
        """Whether it is a module, no matter where Python finds it."""
        return self.text.startswith(_MODULE)

    @property
    def is_program(self) -> bool:
        """Whether it is a program outside the project."""
        return self.text.startswith(_PROGRAM)

    @property
    def is_file(self) -> bool:
        """Whether it is a file of the project."""
        return not (self.is_module or self.is_program)

    @property
    def name(self) -> str:
        """The path, or the name of the module or program."""
        return self.text if self.is_file else self.text.partition(" ")[2]

    @property
    def is_python(self) -> bool:
        """Whether Python runs it."""
        return self.is_module or (self.is_file and self.text.endswith(".py"))

    @property
    def label(self) -> str:
        """The name given to its runs."""
        if self.is_module:
            parts = self.name.split(".")
            name = next((part for part in reversed(parts) if part not in _GENERAL), parts[0])
        else:
            name = PurePosixPath(self.name).stem
        return as_name(name)


def as_name(text: str) -> str:
    """Return a string converted to a valid job name."""
    return re.sub(_NO_NAME, "-", text).strip("-.")[:40] or "script"
