"""Finds the files that a script writes, and reads what is added to them, within budgets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from trnslurm.contract.files import open_file

_DEEPEST, _MOST_ENTRIES = 8, 10_000
_PASSED_BY = {"node_modules", "__pycache__", "site-packages", "mlruns"}


class Tail:
    """The end of a growing file. Each read continues where the previous one was told to stop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._known: tuple[int, int] | None = None
        """The file's inode, and its size when last seen."""

    def read(self, most_bytes: int) -> tuple[bytes, bool]:
        """Return new data up to a limit, and whether it starts at the file's beginning.

        A file that was replaced or truncated is read from its beginning.
        """
        with open_file(self.path) as stream:
            now = os.fstat(stream.fileno())
            if self._known and (self._known[0] != now.st_ino or now.st_size < self._known[1]):
                self._at = 0
            self._known = (now.st_ino, now.st_size)
            first = self._at == 0
            stream.seek(self._at)
            return stream.read(most_bytes), first

    def done(self, count: int) -> None:
        """Continue after so many bytes, possibly beyond the end of the file."""
        self._at += count

    def behind(self) -> int:
        """Return the number of unread bytes."""
        try:
            return max(0, self.path.stat().st_size - self._at)
        except OSError:
            return 0


def found_in(directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the files below directories. Links and hidden directories are not followed."""
    todo = [(directory, 0) for directory in dict.fromkeys(directories)]
    seen = 0
    while todo:
        place, depth = todo.pop()
        try:
            with os.scandir(place) as entries:
                listed = [*islice(entries, _MOST_ENTRIES - seen)]
        except OSError:
            continue
        seen += len(listed)
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                hidden = entry.name.startswith(".") or entry.name in _PASSED_BY
                if depth < _DEEPEST and not hidden:
                    todo.append((place / entry.name, depth + 1))
            elif entry.is_file(follow_symlinks=False):
                yield place / entry.name
