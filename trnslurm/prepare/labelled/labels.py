"""Labels in rows, and their numbers in training."""

import re
from dataclasses import dataclass, field
from typing import Any

from trnslurm.prepare.errors import PrepareError

MOST = 1000
"""The most labels that data can have; more mean that the column is another one."""
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(kw_only=True)
class Labels:
    """The labels of rows: numbers on a scale, known names, or the names found in the rows."""

    names: list[str]
    """In the order of their numbers; empty: not known before the rows are read."""
    scale: tuple[float, float] | None
    """Labels are numbers between these two, and have no names."""
    found: dict[str, str] = field(default_factory=dict)
    """Each label, and where it was first found."""

    def take(self, value: Any, where: str) -> str | None:
        """Return the text of a row's label, or None if it has none; refuse other values."""
        if value is not None and not isinstance(value, str | int | float):
            raise PrepareError(
                f"{where}: label {str(value)[:40]} is neither a name nor a number: fix it, or "
                "choose the column with --label-column"
            )
        if isinstance(value, float) and value.is_integer() and not self.scale:
            value = int(value)  # a table has whole numbers as floats once one of them is missing
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
            numbers = "" if self._are_numbers() else f", nor of 0 to {len(self.names) - 1}"
            raise PrepareError(
                f"{where}: label {text[:40]!r} is none of {', '.join(self.names)}{numbers}: fix "
                "it, or name all labels with --label"
            )
        if len(self.found) > MOST:
            raise PrepareError(
                f"{where}: more than {MOST} different labels: choose their column with "
                "--label-column"
            )

    def _known(self) -> dict[str, int]:
        known = {name: number for number, name in enumerate(self.names)}
        # If names are numbers, such as 0 and 2, a 1 is a mistake and not the number of a label.
        return known if self._are_numbers() else {str(n): n for n in known.values()} | known

    def _are_numbers(self) -> bool:
        return any(_INTEGER.fullmatch(name) for name in self.names)

    def numbers(self) -> dict[str, int]:
        """Return the number of every label once all rows are read; on a scale there are none."""
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
                    f"{where}: label {text!r}: whole numbers must be 0, 1, 2, …: fix it, or name "
                    "all labels with --label"
                )
        missing = [n for n in range(min(int(last), MOST)) if str(n) not in self.found]
        if missing:
            raise PrepareError(
                f"{self.found[last]}: label {last!r}, but {missing[0]} is nowhere: fix it, or "
                "name all labels with --label"
            )
        return [str(number) for number in range(int(last) + 1)]


def _is_between(text: str, least: float, most: float) -> bool:
    try:
        return least <= float(text) <= most
    except ValueError:
        return False
