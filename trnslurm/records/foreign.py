"""Guards against files that another user may have written: checks them and never runs them."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trnslurm.contract.rundir import CODE, OF_COUNT
from trnslurm.errors import ConfigError, RunError

T = TypeVar("T")

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def is_ours(path: Path) -> bool:
    """Check whether a path belongs to this user or root. A link's target must, too."""
    return _foreign_owner(path) is None


def refuse_foreign(path: Path, verb: str) -> None:
    """Refuse to run a path's content if another user, except root, could have written it."""
    if (uid := _foreign_owner(path)) is not None:
        owner = user_name(uid)
        raise RunError(
            f"{path} belongs to {owner}, and its commands would run as you: only {owner} can "
            f"{verb} it"
        )
    if path.stat().st_mode & stat.S_IWOTH:
        raise RunError(
            f"every user can write to {path}: check its contents, then run chmod o-w on it"
        )


def refuse_writable(run: Path, *files: Path) -> None:
    """Refuse a run, or files of it, if users other than its owner could have written them."""
    about = run.stat()
    # The permissions of a file matter only to those who can enter the run's directory.
    entering = (about.st_mode & (stat.S_IXGRP | stat.S_IXOTH)) << 1
    for path, status, others in (
        (run, about, _OTHERS),
        *((file, file.lstat(), entering) for file in files),
    ):
        if status.st_mode & others and not stat.S_ISLNK(status.st_mode):
            raise RunError(
                f"users other than its owner can write to {path}: check its contents, then run "
                f"chmod {'-R ' if files else ''}go-w on {run if files else 'it'}"
            )
        if status.st_uid not in (0, about.st_uid):
            raise RunError(
                f"{path} belongs to {user_name(status.st_uid)}, but the run belongs to "
                f"{user_name(about.st_uid)}: check its contents, then delete it"
            )


def refuse_writable_code(run: Path) -> None:
    """Refuse a run if users other than its owner could have written its scripts or its code.

    Python uses bytecode in place of a source file if only the recorded size and time match:
    https://docs.python.org/3/reference/import.html#cached-bytecode-invalidation.
    """
    trees = [run / CODE, *run.glob(OF_COUNT.format("*"))]
    below = [file for tree in trees for file in tree.rglob("*")]
    refuse_writable(run, *run.iterdir(), *below)


def commands_of(directory: str | None, run: Path) -> str | None:
    """Return the command directory from a run's record, or None (use PATH) if it is not trusted.

    For another user's run, a directory is trusted only if nobody but root and this user can change
    it.
    """
    if directory is None or is_ours(run) or _only_ours(Path(directory)):
        return directory
    return None


def _only_ours(directory: Path) -> bool:
    try:
        real = directory.resolve(strict=True)
        closed = not real.stat().st_mode & _OTHERS
        # In a sticky directory, users cannot move the files of others.
        safe = [
            p.stat().st_mode & stat.S_ISVTX or not p.stat().st_mode & _OTHERS for p in real.parents
        ]
        return closed and all(safe) and all(map(is_ours, (real, *real.parents)))
    except OSError:
        return False


def _foreign_owner(path: Path) -> int | None:
    """Return the owner of a path or its link if that is neither this user nor root."""
    owners = (path.stat().st_uid, path.lstat().st_uid)
    return next((uid for uid in owners if uid not in (0, os.geteuid())), None)


def this_user() -> str:
    """Return this user's name, or number, because a user in a container may have no name.

    Slurm identifies a job's user by number, whereas the variable USER can have any value.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())  # Slurm's commands take it too


def user_name(uid: int) -> str:
    """Return the name of a user, or a phrase with the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def printable(text: str) -> str:
    """Return text with control characters and line breaks escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cleaned(value: Any) -> Any:
    """Return a value from JSON with all its strings made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {k: cleaned(v) for k, v in value.items()}
    return [cleaned(v) for v in value] if isinstance(value, list) else value


def read_fields(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass with the values of a JSON object. A wrong type raises a ValueError.

    Strings are made printable. Keys that are not fields are ignored.
    """
    # Imported here: `trnslurm --help` needs only `printable`, and no configuration.
    from trnslurm.config.tree import build, check, fields_of, lacking

    hints = fields_of(cls)
    known = {key: cleaned(value) for key, value in values.items() if key in hints}
    if missing := lacking(cls, known):
        raise ValueError(f"missing {', '.join(missing)}")
    try:
        return build(cls, check(known, hints, cls.__name__))
    except ConfigError as error:
        raise ValueError(str(error)) from None
