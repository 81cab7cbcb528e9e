"""How far files that another user may have written are trusted: read and checked, never run."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trnslurm.errors import ConfigError, RunError

T = TypeVar("T")

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_ours(path: Path) -> bool:
    """Check whether a file or directory belongs to this user, or to root; of a link both do."""
    return _foreign_owner(path) is None


def refuse_foreign(path: Path, verb: str) -> None:
    """Refuse a path whose content would run, if another user than root could have put it there."""
    if (uid := _foreign_owner(path)) is not None:
        owner = _user_name(uid)
        raise RunError(
            f"{path} belongs to {owner}, and what is in it would run as you: only {owner} can "
            f"{verb} it"
        )
    if path.stat().st_mode & stat.S_IWOTH:
        raise RunError(f"{path} can be written by everybody: see what is in it, and chmod o-w it")


def refuse_writable(directory: Path) -> None:
    """Refuse a directory that others than its owner can write to."""
    if directory.stat().st_mode & _OTHERS:
        raise RunError(
            f"{directory} can be written by others than its owner: see what is in it, and "
            "chmod go-w it"
        )


def commands_of(directory: str | None, run: Path) -> str | None:
    """Return the directory of commands in a run's record; None, for PATH, if it is not trusted.

    That of another user's run must be a directory that nobody but root and we can change.
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


def _foreign_owner(path: Path) -> int | None:
    """Return who else could put another file in a path's place: whose it is, or a link to it."""
    owners = (path.stat().st_uid, path.lstat().st_uid)
    return next((uid for uid in owners if uid not in (0, os.geteuid())), None)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def printable(text: str) -> str:
    """Return text with everything escaped that would drive a terminal or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: Any) -> Any:
    """Return a value from JSON with every text in it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {k: cleaned(v) for k, v in value.items()}
    return [cleaned(v) for v in value] if isinstance(value, list) else value


def read_fields(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass with the values of a JSON object; a wrong type is a ValueError.

    Its texts are made printable. Keys that are not its fields are left out.
    """
    # Not above: `trnslurm --help` needs only `printable`, and no configuration.
    from trnslurm.config.tree import build, check, fields_of, lacking

    hints = fields_of(cls)
    known = {key: cleaned(value) for key, value in values.items() if key in hints}
    if missing := lacking(cls, known):
        raise ValueError(f"it lacks {', '.join(missing)}")
    try:
        return build(cls, check(known, hints, cls.__name__))
    except ConfigError as error:
        raise ValueError(str(error)) from None
