"""Names that say what they mean."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """A name, like Python's StrEnum since 3.11."""

    __str__ = str.__str__


class Meant(Name):
    """A name with its meaning, for enumeration members: `NAME = "name", "meaning"`."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Meant:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member
