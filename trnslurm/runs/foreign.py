"""What is believed of files that another user may have written: looked at, checked, never run."""

from __future__ import annotations

import os
import pwd
import stat
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trnslurm.errors import RunError

T = TypeVar("T")

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_ours(path: Path) -> bool:
    """Whether a file or directory belongs to this user, or to root."""
    return path.stat().st_uid in (0, os.geteuid())


def refuse_foreign(path: Path, verb: str) -> None:
    """Refuse to run what lies somewhere if another user than root could have put it there."""
    status = path.stat()
    if not is_ours(path):
        owner = _user_name(status.st_uid)
        raise RunError(
            f"{path} belongs to {owner}, and what is in it would run as you: only {owner} can "
            f"{verb} it"
        )
    if status.st_mode & stat.S_IWOTH:
        raise RunError(f"{path} can be written by everybody: see what is in it, and chmod o-w it")


def refuse_writable(directory: Path) -> None:
    """Refuse a directory that others than its owner can write to."""
    if directory.stat().st_mode & _OTHERS:
        raise RunError(
            f"{directory} can be written by others than its owner: see what is in it, and "
            "chmod go-w it"
        )


def commands_of(directory: str | None, run: Path) -> str | None:
    """Return where a run's record says that commands are; None, for PATH, if it cannot be believed.

    Of another user's run only a directory is taken that nobody but root and we can change.
    """
    if directory is None or is_ours(run) or _only_ours(Path(directory)):
        return directory
    return None


def _only_ours(directory: Path) -> bool:
    try:
        real = directory.resolve(strict=True)
        closed = not real.stat().st_mode & _OTHERS
        # Where a directory is sticky, nobody moves what is another's.
        kept = [
            p.stat().st_mode & stat.S_ISVTX or not p.stat().st_mode & _OTHERS for p in real.parents
        ]
        return closed and all(kept) and all(map(is_ours, (real, *real.parents)))
    except OSError:
        return False


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def printable(text: str) -> str:
    """Return text with what would steer a terminal, or break a line, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: Any) -> Any:
    """Return what JSON held with every text of it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {k: cleaned(v) for k, v in value.items()}
    return [cleaned(v) for v in value] if isinstance(value, list) else value


def read_fields(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass made of what JSON held, its texts printable; a wrong type is a ValueError.

    Keys that are not its fields are left out.
    """
    hints = get_type_hints(cls)
    return cls(**{k: _typed(k, v, hints[k]) for k, v in values.items() if k in hints})


def _typed(key: str, value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _typed(key, value, inner)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(key, v, arguments[0]) for v in value)
    if isinstance(value, Mapping) and origin is not tuple and origin is not None:
        return {k: _typed(key, v, arguments[1]) for k, v in value.items()}
    if hint is Any:
        return cleaned(value)
    if origin is not None or type(value) is not hint:
        raise ValueError(f"{key} is {value!r}")
    return cleaned(value)
