"""Finds metric files outside the run that certainly belong to this attempt.

Directories there may contain files of other jobs. W&B's process keeps its file open. TensorBoard's
writer reopens its file for each write (GFile in tensorboard/compat/tensorflow_stub/io/gfile.py),
but names it after its host and process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trnslurm.contract.variables import Variable
from trnslurm.node.numbers import tensorboard, wandb
from trnslurm.node.numbers.files import found_in
from trnslurm.node.stacks import processes_with

# events.out.tfevents.TIME.HOST.PID.NUMBER: EventFileWriter in
# tensorboard/summary/writer/event_file_writer.py; TensorFlow's EventsWriter likewise.
_EVENTS = re.compile(rf"{re.escape(tensorboard.NAME)}(\d+)\.(.+)\.(\d+)\.\d+(?:\.v2)?")
# Script options for output directories. Data options might name a large directory.
_OUTPUT = re.compile(r"out|log|save|run|exp|result|work|dump|board|project|root", re.IGNORECASE)
_INPUT = re.compile(r"data|model|resume|cache", re.IGNORECASE)
_VARIABLES = ("TENSORBOARD_LOGDIR", "TENSORBOARD_LOGGING_DIR")
_MOST_DIRECTORIES = 8
_WRITES = os.O_WRONLY | os.O_RDWR


class Outside:
    """The files of this attempt's processes on this host, updated with each look."""

    def __init__(self, since: float, places: Sequence[Path]) -> None:
        """Store when the attempt started, and the directories whose files are found anyway."""
        self._since, self._places = int(since), places
        self._pids: set[int] = set()
        self._named = [Path(value) for name in _VARIABLES if (value := os.environ.get(name))]

    def found(self) -> Iterator[Path]:
        """Yield the files; a file may appear more than once."""
        names = (Variable.RUN_DIR, Variable.PHASE, Variable.ATTEMPT)
        own = [os.fsencode(f"{name}={os.environ.get(name)}") for name in names]
        for process in processes_with(own):
            if process.pid not in self._pids:
                self._pids.add(process.pid)
                self._named += directories_in(process.pid)
            yield from open_files(process.pid)
        directories = dict.fromkeys(Path(os.path.realpath(named)) for named in self._named)
        theirs = [d for d in directories if not any(d.is_relative_to(p) for p in self._places)]
        for path in found_in(theirs[:_MOST_DIRECTORIES]):
            if self._is_own(path.name):
                yield path

    def _is_own(self, name: str) -> bool:
        told = _EVENTS.match(name)
        if not told or int(told[1]) < self._since:
            return False
        return told[2] == os.uname().nodename and int(told[3]) in self._pids


def directories_in(pid: int) -> Iterator[Path]:
    """Yield the directories that a process's arguments name for its output."""
    with suppress(OSError):
        place = Path(f"/proc/{pid}/cwd").readlink()
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
        for name, value in _options(words):
            if value and _OUTPUT.search(name) and not _INPUT.search(name):
                yield place / value


def _options(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield options with their values: `--name value`, `--name=value` and `name=value`."""
    for word, following in zip(words, [*words[1:], ""]):
        name, is_one, value = word.partition("=")
        if is_one and "/" not in name:
            yield name, value
        elif word.startswith("-"):
            yield word, following


def open_files(pid: int) -> Iterator[Path]:
    """Yield the metric files that a process has opened for writing."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError, LookupError, ValueError):
                path = Path(entry.path).readlink()
                if path.suffix != wandb.SUFFIX and tensorboard.NAME not in path.name:
                    continue
                told = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text(encoding="ascii")
                if int(re.findall(r"^flags:\s*([0-7]+)$", told, re.M)[0], 8) & _WRITES:
                    yield path
