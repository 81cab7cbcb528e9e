"""The results of adopt: the lines of a batch script, and a command for the whole script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

from trnslurm.adopt.texts import shell_word
from trnslurm.frozen import Frozen

Fate = Literal["taken", "ours", "left out", "once", "unclear"]


class Line(Frozen):
    """The translation of a statement or of an sbatch option."""

    number: int
    text: str
    fate: Fate
    becomes: str


class Adopted(Frozen):
    """A batch script that has been read."""

    file: Path
    lines: tuple[Line, ...]
    options: tuple[str, ...]
    """Options of `trnslurm submit`; marked names are variables of the user's shell."""
    command: tuple[str, ...]
    """The words after --; empty if no command was understood."""
    directory: str
    """The directory in which to submit; empty for the current one."""

    @property
    def unclear(self) -> list[Line]:
        """The lines that were not understood."""
        return [line for line in self.lines if line.fate == "unclear"]

    @property
    def line(self) -> str:
        """The command line that submits the script; empty if there is none."""
        go = f"cd {shell_word(self.directory)} && " if self.directory else ""
        words = [*map(shell_word, self.options), "--", *map(shell_word, self.command)]
        return f"{go}trnslurm submit {' '.join(words)}" if self.command else ""


def as_sweep(tasks: Sequence[Adopted], at_most: int | None) -> Adopted | None:
    """Return a job array as one sweep, or None if its tasks differ in more than a few words."""
    first = tasks[0]
    alike = {(each.options, each.directory, len(each.command)) for each in tasks}
    if len(alike) > 1 or not first.command:
        return None
    values: dict[tuple[str, ...], str] = {}
    command: list[str] = []
    for words in zip(*(each.command for each in tasks), strict=True):
        if len({*words}) > 1:
            words = _with_places(words, values)
        if len({*words}) > 1:
            same = words[0].find("=") + 1 if len({w.partition("=")[0] for w in words}) == 1 else 0
            value = tuple(word[same:] for word in words)
            if any(not re.fullmatch(r"[\w.+/:@-]+", each) for each in value):
                return None
            values[value] = f"{{task_{len(values) + 1}}}"
            words = (words[0][:same] + values[value],)
        command.append(words[0])
    each_once = [[*dict.fromkeys(value)] for value in values]
    if sorted(zip(*values, strict=True)) != sorted(product(*each_once)):
        return None
    options = [word for place, several in zip(values.values(), each_once, strict=True)
               for word in ("--sweep", f"places.{place[1:-1]}={','.join(several)}")]  # fmt: skip
    options += ["--at-most", str(at_most)] if at_most else []
    lines = tuple(
        replace(line, fate="taken", becomes=" ".join(options))
        if line.text.startswith("#SBATCH --array") else line for line in first.lines
    )  # fmt: skip
    return replace(first, lines=lines, options=(*first.options, *options), command=tuple(command))


def _with_places(words: tuple[str, ...], values: Mapping[tuple[str, ...], str]) -> tuple[str, ...]:
    """Return the words of the tasks with a placeholder instead of the value that differs."""
    for value, place in values.items():
        alike = tuple(w.replace(v, place) for w, v in zip(words, value, strict=True))
        if len({*alike}) == 1:
            return alike
    return words
