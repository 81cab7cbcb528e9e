"""Reads what a console script runs, that is, a package's program such as `litgpt`.

The package's files on this machine show how often it starts. A program that starts its workers
itself starts once per node. A program whose workers find each other by RANK and WORLD_SIZE starts
once per worker. The program's own module is checked first, because other modules in the package may
start workers for another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from trnslurm.config.entry import Entry
from trnslurm.contract.files import read_file

# https://packaging.python.org/en/latest/specifications/entry-points/#use-for-scripts: pip
# writes a few lines that import one function. A package's own script may import its module instead.
_SCRIPT = re.compile(
    r"\A#!.*python.*\n(?s:.*?)^\s*(?:from +([\w.]+) +import +\w+|import +(\w+(?:\.\w+)+))",
    re.MULTILINE,
)
_STARTS = re.compile(
    rb"torch\.distributed\.(?:run|launch)\b|\belastic_launch\b|\bmp\.spawn\b|\bnotebook_launcher\b"
    rb"|multiprocessing\.spawn\b|[\"']torchrun\b|[\"']accelerate(?: |[\"'], *[\"'])launch\b"
    rb"|\bnemo_run\b"
)
_JOINS = re.compile(
    rb"\binit_process_group\(|\binit_distributed\(|\bAccelerator\(|[\"']WORLD_SIZE[\"']"
    rb"|^\s*(?:from|import) +(?:pytorch_)?lightning\b"
    rb"|^\s*from transformers\b[^#\n]*\b(?:Seq2Seq)?Trainer\b",
    re.MULTILINE,
)
_LONGEST_SCRIPT, _LONGEST_SOURCE, _MOST_SOURCES = 4 << 10, 1 << 18, 1_000


class Starts(NamedTuple):
    """How often a program starts, and the reason in words."""

    per: Literal["worker", "node"]
    why: str


class Module(NamedTuple):
    """A module outside the project's files, or a package in them, and where to look for it."""

    name: str
    roots: tuple[Path, ...]

    def texts(self) -> Iterator[bytes]:
        """Yield the module's source files. Those of a package include all files below it."""
        places = [root.joinpath(*self.name.split(".")) for root in self.roots]
        here = next((place for place in places if place.is_dir()), None)
        files = [place.with_name(f"{place.name}.py") for place in places]
        for file in islice(sorted(here.rglob("*.py")), _MOST_SOURCES) if here else files:
            with suppress(OSError):
                yield read_file(file, _LONGEST_SOURCE)

    @property
    def package(self) -> Module:
        """The package that contains it."""
        return self._replace(name=self.name.partition(".")[0])


def module_of(entry: Entry, project: Path) -> Module | None:
    """Return the module that a console script or `-m` runs, if this machine has its package.

    It is looked for in the environment of the script, or of the python on PATH, and in the project.
    """
    import shutil  # slow, and most commands start no script

    found = shutil.which(entry.name if entry.is_program else "python")
    if found is None or entry.is_file:
        return None
    name = _imported_by(Path(found)) if entry.is_program else entry.name
    installed = Path(found).parent.parent.glob("lib/python3*/site-packages")
    return Module(name, (*installed, project, project / "src")) if name else None


def starts_of(name: str) -> Starts | None:
    """Return how often a console script starts, or None if none is installed by that name."""
    module = module_of(Entry.program(name), Path())
    if module is None:
        return None
    package = module.package.name
    other = f"--per {{}} starts {name} once per {{}}"
    for texts in ([*module.texts()], [*module.package.texts()]):
        if any(map(_STARTS.search, texts)):
            why = f"{package} starts workers itself; {other.format('worker', 'worker')}"
            return Starts("node", f"Starting {name} once per node: {why}")
        if any(map(_JOINS.search, texts)):
            why = f"{package} reads RANK and WORLD_SIZE; {other.format('node', 'node')}"
            return Starts("worker", f"Starting {name} once per worker: {why}")
    return Starts("node", f"Starting {name} once per node; {other.format('worker', 'worker')}")


def _imported_by(file: Path) -> str | None:
    """Return the module that a console script imports its function from."""
    try:
        text = read_file(file, _LONGEST_SCRIPT).decode(errors="replace")
    except OSError:  # or the file is too large, as a compiled program is
        return None
    found = _SCRIPT.match(text)
    return found[1] or found[2] if found else None
