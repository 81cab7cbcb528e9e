"""Reads directories that a script has written, within a budget; links are not followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from trnslurm.contract.files import open_file, read_file

Named = dict[str, os.DirEntry[str]]
"""The entries of a directory by their names."""

_DEEPEST, _MOST_ENTRIES = 8, 20_000
_MOST_BESIDE = 200
_NO_RESULTS = {"wandb", "mlruns", "node_modules", "__pycache__", "site-packages"}
_WORD_BYTES = 256
_COMPARED_BYTES = 64 << 20


def walk(directory: Path) -> Iterator[tuple[Path, Named, list[str]]]:
    """Yield the directories below one, top down, each with its entries by name.

    The third item lists the names of the subdirectories to visit. The caller can remove some of
    them.
    """
    todo, seen = [(directory, 0)], 0
    while todo and not directory.is_symlink():
        here, depth = todo.pop(0)
        try:
            with os.scandir(here) as entries:
                named = {entry.name: entry for entry in islice(entries, _MOST_ENTRIES - seen)}
        except OSError:
            continue
        seen += len(named)
        below = [
            name
            for name, entry in named.items()
            if not name.startswith(".") and name not in _NO_RESULTS and is_directory(entry)
        ]
        yield here, named, below
        if depth < _DEEPEST:
            todo += [(here / name, depth + 1) for name in sorted(below)]


def same(path: Path, ours: Path) -> bool:
    """Check whether a file is identical to the project's file."""
    try:
        if path.stat().st_size != ours.stat().st_size:
            return False
        with open_file(path) as one, open_file(ours) as other:
            for _ in range(0, _COMPARED_BYTES, 1 << 20):
                some = one.read(1 << 20)
                if some != other.read(1 << 20):
                    return False
                if not some:
                    return True
    except OSError:
        pass
    return False


def entries_in(directory: Path) -> Named:
    try:
        if directory.is_symlink():
            return {}
        with os.scandir(directory) as entries:
            return {entry.name: entry for entry in islice(entries, _MOST_ENTRIES)}
    except OSError:
        return {}


def beside(here: Path) -> list[str]:
    try:
        with os.scandir(here.parent) as entries:
            return [entry.name for entry in islice(entries, _MOST_BESIDE)]
    except OSError:
        return []


def changed_in(path: Path, entry: os.DirEntry[str]) -> float:
    """Return when a file, or anything in a directory, last changed."""
    times = [time_of(entry)]
    if is_directory(entry):
        for name, each in entries_in(path).items():
            times.append(time_of(each))
            if is_directory(each):
                times += map(time_of, entries_in(path / name).values())
    return max(times)


def time_of(entry: os.DirEntry[str]) -> float:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_mtime
    return 0.0


def is_directory(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False


def is_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_file(follow_symlinks=False)
    return False


def word_in(pointer: Path) -> str:
    """Return the only word of a file; empty if it does not contain exactly one."""
    try:
        if pointer.is_symlink():
            return ""
        return read_file(pointer, _WORD_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""
