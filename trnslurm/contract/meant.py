"""Names that say what they mean."""

from __future__ import annotations

from enum import StrEnum


class Meant(StrEnum):
    """A name, and what it means: for the members of an enumeration, `NAME = "name", "meaning"`."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Meant:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member
