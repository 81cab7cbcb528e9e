"""Names that say what they mean."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """A name; what Python has as StrEnum since 3.11."""

    __str__ = str.__str__


class Meant(Name):
    """A name, and what it means: for the members of an enumeration, `NAME = "name", "meaning"`."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Meant:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member
