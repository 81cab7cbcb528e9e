"""Labels in rows, and their numbers in training."""

import re
from dataclasses import dataclass, field
from typing import Any

from trnslurm.prepare.errors import PrepareError

MOST = 1000
"""The most labels that data can have. More labels mean that the column is the wrong one."""
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(kw_only=True)
class Labels:
    """The labels of rows: numbers on a scale, known names, or the names found in the rows."""

    names: list[str]
    """Names in the order of their numbers; empty if they are unknown before the rows are read."""
    scale: tuple[float, float] | None
    """If set, labels are numbers between these two values, and have no names."""
    found: dict[str, str] = field(default_factory=dict)
    """Each label, with the place where it was first found."""

    def take(self, value: Any, where: str) -> str | None:
        """Return the text of a row's label, or None if it has none; reject other values."""
        if value is not None and not isinstance(value, str | int | float):
            raise PrepareError(
                f"{where}: label {str(value)[:40]} is neither a name nor a number: fix it, or "
                "choose the column with --label-column"
            )
        if isinstance(value, float) and value.is_integer() and not self.scale:
            value = int(value)  # a table stores whole numbers as floats if one of them is missing
        text = "" if value is None else str(value).strip()
        if not text or text == "nan":
            return None
        if text not in self.found:
            if not self.scale:
                self.found[text] = where
            self._check(text, where)
        return text

    def _check(self, text: str, where: str) -> None:
        if self.scale and not _is_between(text, *self.scale):
            least, most = self.scale
            raise PrepareError(
                f"{where}: label {text[:40]!r} is not a number from {least:g} to {most:g}: fix it"
            )
        if self.names and text not in self._known():
            numbers = (
                "" if self._are_numbers() else f", nor a number from 0 to {len(self.names) - 1}"
            )
            raise PrepareError(
                f"{where}: label {text[:40]!r} is not one of {', '.join(self.names)}{numbers}: fix "
                "it, or name all labels with --label"
            )
        if len(self.found) > MOST:
            raise PrepareError(
                f"{where}: there are more than {MOST} different labels: choose the label column "
                "with "
                "--label-column"
            )

    def _known(self) -> dict[str, int]:
        known = {name: number for number, name in enumerate(self.names)}
        # If names are numbers, such as 0 and 2, a 1 is a mistake, not the number of a label.
        return known if self._are_numbers() else {str(n): n for n in known.values()} | known

    def _are_numbers(self) -> bool:
        return any(_INTEGER.fullmatch(name) for name in self.names)

    def numbers(self) -> dict[str, int]:
        """Return the number of every label after all rows are read; a scale has none."""
        if self.scale:
            return {}
        if not self.names:
            self.names = self._find_names()
        return self._known()

    def _find_names(self) -> list[str]:
        if len(self.found) < 2:
            raise PrepareError(f"all rows have the same label, {next(iter(self.found), '')!r}")
        if not all(_INTEGER.fullmatch(text) for text in self.found):
            return sorted(self.found)
        last = max(self.found, key=int)
        for text, where in self.found.items():
            if int(text) < 0 or str(int(text)) != text:
                raise PrepareError(
                    f"{where}: label {text!r}: whole-number labels must be 0, 1, 2, …: fix it, or "
                    "name "
                    "all labels with --label"
                )
        missing = [n for n in range(min(int(last), MOST)) if str(n) not in self.found]
        if missing:
            raise PrepareError(
                f"{self.found[last]}: there is a label {last!r}, but no label {missing[0]}: fix "
                "it, or "
                "name all labels with --label"
            )
        return [str(number) for number in range(int(last) + 1)]


def _is_between(text: str, least: float, most: float) -> bool:
    try:
        return least <= float(text) <= most
    except ValueError:
        return False
