"""Claims of one resource by several processes, on any hosts: the highest number counts.

    DIRECTORY/claim-1.json

A process takes a claim by creating the file with the next number, which only one process can do,
even on NFS. A stale claim keeps its file, because two processes could remove it at the same time.
So no number is used twice, and a process with an outdated view of the directory cannot take a newer
claim.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from trnslurm.contract.files import read_json
from trnslurm.contract.times import now_there
from trnslurm.frozen import Frozen

PREFIX = "claim-"


class Holder(Frozen):
    """The process that took a claim; empty if it is not written yet or not readable."""

    user: str = ""
    host: str = ""
    process: str = ""
    """The submitting process, as pid@start."""
    run: str = ""
    """The directory of the run that compiles."""
    job: str = ""
    """Its precompile job, or pid@start on the local cluster. Empty until the job is submitted."""
    over: bool = False
    """Whether the claim was released."""


class Claim(Frozen, kw_only=False):
    """One claim."""

    path: Path
    number: int
    holder: Holder
    uid: int
    """The owner of its file."""
    changed: float

    @property
    def age_s(self) -> float:
        """Return how long ago it was written, by the clock that stamps its file."""
        return now_there(self.path.parent) - self.changed


def newest_in(directory: Path, prefix: str = PREFIX) -> Claim | None:
    """Return the claim that counts, or None."""
    for number, path in sorted(_claims(directory, prefix), reverse=True):
        try:
            status = path.stat()
        except OSError:
            continue  # just dropped, or not a file
        return Claim(path, number, _read(path), status.st_uid, status.st_mtime)
    return None


def take_next(
    directory: Path, holder: Holder, after: Claim | None, readers: Path, prefix: str = PREFIX
) -> Claim | None:
    """Take the claim that follows a stale one, or return None if another process was faster.

    Everyone who can read `readers` can read the claim.
    """
    number = after.number + 1 if after else 1
    path = directory / f"{prefix}{number}.json"
    mode = 0o600 | (readers.stat().st_mode & 0o044)
    try:
        stream = path.open("x", encoding="utf-8")
    except FileExistsError:
        return None
    try:
        with stream:
            os.fchmod(stream.fileno(), mode)
            json.dump(_written(holder), stream)
    except OSError:  # such as a full disk: an empty claim would block other processes
        path.unlink(missing_ok=True)
        raise
    claim = Claim(path, number, holder, os.getuid(), path.stat().st_mtime)
    for other, old in _claims(directory, prefix):
        if other > number:  # the stale claim was not the newest one
            drop_claim(claim)
            return None
        if other < number:
            with contextlib.suppress(OSError):
                old.unlink()
    return claim


def update_claim(claim: Claim, holder: Holder) -> None:
    """Replace the contents of a claim's file."""
    partial = claim.path.with_name(f".{claim.path.name}")
    try:
        partial.touch(mode=0o600)  # before it gets the mode of the claim
        partial.write_text(json.dumps(_written(holder)), encoding="utf-8")
        partial.chmod(claim.path.stat().st_mode)
        partial.rename(claim.path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def drop_claim(claim: Claim) -> None:
    """Give back an unused claim."""
    claim.path.unlink(missing_ok=True)


def _claims(directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    with contextlib.suppress(OSError):  # no directory yet, or not readable
        for path in directory.iterdir():
            if match := re.fullmatch(rf"{re.escape(prefix)}(\d+)\.json", path.name):
                yield int(match[1]), path


def _written(holder: Holder) -> dict[str, object]:
    return {name: value for name, value in asdict(holder).items() if value}


def _read(path: Path) -> Holder:
    said = read_json(path)
    texts = {n: t for n, t in said.items() if isinstance(t, str) and t.isprintable()}
    return Holder(
        **{name: texts.get(name, "") for name in ("user", "host", "process", "run", "job")},
        over=said.get("over") is True,
    )
