"""What users' scripts and files rely on: tests/stable/ has it, and a test compares."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "stable"
JSON = "json.txt"


class Stable:
    """The files of tests/stable, whose lines are PART: NAME; --update-goldens rewrites parts."""

    def __init__(self, test: str, *, update: bool) -> None:
        self._test, self._update = test, update

    def compare(self, file: str, found: Mapping[str, Sequence[str]]) -> None:
        """Compare all names of a file."""
        if self._update:
            write(file, found)
        self._refuse(file, parts_of(file), found)

    def json(self, command: str, *outputs: Any, free: Sequence[str] = ()) -> None:
        """Compare the keys of a command's --json; those below `free` are the user's own."""
        paths = {path for output in outputs for path in _paths(output, "", free)}
        kept, found = parts_of(JSON), {command: sorted(paths)}
        if self._update:
            write(JSON, kept | found)
            return
        self._refuse(JSON, {command: kept.get(command, [])}, found)

    def _refuse(
        self, file: str, kept: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[str]]
    ) -> None:
        was, now = _lines(kept), _lines(found)
        changes = [line for line in difflib.ndiff(was, now) if line[0] in "-+"]
        assert not changes, "".join(
            [
                f"tests/stable/{file}: users rely on these names\n",
                *changes,
                f"If it is meant: pytest '{self._test}' --update-goldens, and CHANGELOG.md says so;"
                " CONTRIBUTING.md, Names that stay, says how a name goes.\n",
            ]
        )


def parts_of(file: str) -> dict[str, list[str]]:
    """Return the names in a file, by part."""
    parts: dict[str, list[str]] = {}
    path = PLACE / file
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        part, _, name = line.partition(": ")
        parts.setdefault(part, []).append(name)
    return parts


def write(file: str, parts: Mapping[str, Sequence[str]]) -> None:
    (PLACE / file).write_text("".join(_lines(parts)), encoding="utf-8")


def _lines(parts: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{part}: {name}\n" for part, names in sorted(parts.items()) for name in names]


def _paths(data: Any, above: str, free: Iterable[str]) -> Iterator[str]:
    if isinstance(data, list):
        for each in data:
            yield from _paths(each, f"{above}[]", free)
    elif isinstance(data, dict):
        for key, value in data.items():
            path = f"{above}.{key}".lstrip(".")
            yield path
            if path not in free:
                yield from _paths(value, path, free)
