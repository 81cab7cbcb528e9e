"""How often a console script starts, that is, a package's program such as `litgpt`.

The package's files on this machine decide. A program that starts its workers itself starts once per
node. A program whose workers find each other by RANK and WORLD_SIZE starts once per worker. The
program's own module is checked first, because other modules in the package may start workers for
another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from trnslurm.contract.files import read_file

# https://packaging.python.org/en/latest/specifications/entry-points/#use-for-scripts: pip
# writes a few lines that import one function.
_SCRIPT = re.compile(r"\A#!.*python.*\n(?s:.*?)^\s*from +([\w.]+) +import +\w+", re.MULTILINE)
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


def starts_of(name: str) -> Starts | None:
    """Return how often a console script starts, or None if none is installed by that name."""
    import shutil  # slow, and most commands start no script

    found = shutil.which(name)
    if found is None or (module := _module_of(Path(found))) is None:
        return None
    package = module.partition(".")[0]
    other = f"--per {{}} starts {name} once per {{}}"
    for texts in ([*_texts_of(module, Path(found))], [*_texts_of(package, Path(found))]):
        if any(map(_STARTS.search, texts)):
            why = f"{package} starts workers itself; {other.format('worker', 'worker')}"
            return Starts("node", f"Starting {name} once per node: {why}")
        if any(map(_JOINS.search, texts)):
            why = f"{package} reads RANK and WORLD_SIZE; {other.format('node', 'node')}"
            return Starts("worker", f"Starting {name} once per worker: {why}")
    return Starts("node", f"Starting {name} once per node; {other.format('worker', 'worker')}")


def _module_of(file: Path) -> str | None:
    """Return the module that a console script imports its function from."""
    try:
        text = read_file(file, _LONGEST_SCRIPT).decode(errors="replace")
    except OSError:  # or the file is too large, as a compiled program is
        return None
    found = _SCRIPT.match(text)
    return found[1] if found else None


def _texts_of(name: str, script: Path) -> Iterator[bytes]:
    """Yield the source files of a package or module in the script's environment or here."""
    roots = [*script.parent.parent.glob("lib/python3*/site-packages"), Path(), Path("src")]
    places = [root.joinpath(*name.split(".")) for root in roots]
    here = next((place for place in places if place.is_dir()), None)
    files = [place.with_name(f"{place.name}.py") for place in places]
    for file in islice(sorted(here.rglob("*.py")), _MOST_SOURCES) if here else files:
        with suppress(OSError):
            yield read_file(file, _LONGEST_SOURCE)
