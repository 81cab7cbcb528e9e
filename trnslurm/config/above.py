"""Paths above a custom script's project, such as `../../data`, which a run does not copy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# A run's links to data next to the project are made elsewhere.
_LINKED = re.compile(r"\.\./(?:data|datasets?|inputs?|corpus|corpora)(?:/(?!\.\.)[\w.-]+)*/?")
_TEXT = re.compile(r"""["' =:]((?:\.\./)+(?:\.\.|[\w.-]+(?:/[\w.-]+)*))(?=["'\s,/\])}]|$)""", re.M)

# os.path.join(here, "..", "..", "data")
_JOIN = re.compile(r"""(["'])((?:\.\./)*\.\.)\1\s*,\s*["']""")


def with_whole_paths(arguments: Sequence[str], directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return arguments with absolute paths for files above a directory, and the paths changed."""
    changed: dict[str, str] = {}
    found = []
    for word in arguments:
        before, equals, value = word.rpartition("=")
        if (
            value.startswith("../")
            and not _LINKED.fullmatch(value)
            and (directory / value).exists()
        ):
            changed[value] = os.path.abspath(directory / value)  # noqa: PTH100
            word = f"{before}{equals}{changed[value]}"
        found.append(word)
    return found, changed


def names_above(texts: Mapping[Path, str], root: Path) -> Iterator[tuple[str, str]]:
    """Yield each file and a path in its text that exists only above the project."""
    for file, text in texts.items():
        while (joined := _JOIN.sub(r"\1\2/", text)) != text:
            text = joined
        for name in dict.fromkeys(match[1] for match in _TEXT.finditer(text)):
            if _LINKED.fullmatch(name):
                continue
            places = [Path(os.path.normpath(base / name)) for base in (root, file.parent)]
            there = [place for place in places if place.exists()]
            if there and not any(place.is_relative_to(root) for place in there):
                yield file.relative_to(root).as_posix(), name
