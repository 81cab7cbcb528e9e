"""Who compiles a key: two submissions of one cold key at the same moment become one compilation.

    CACHE/trnslurm/KEY/claim-1.json    the highest number counts

A claim is taken by creating the next number's file, which only one can. A stale one is not removed
to be taken again: two could do that at once.
"""

import contextlib
import getpass
import json
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path

from trnslurm.frozen import Frozen
from trnslurm.node.graphs.manifest import (
    foreign_place,
    is_trusted,
    key_dir,
    mode_for_others,
    refuse_place,
)
from trnslurm.rundir import read_json

_NAME = re.compile(r"claim-(\d+)\.json")


class Holder(Frozen):
    """Who took a claim. Empty: not written yet, or not readable."""

    user: str = ""
    host: str = ""
    process: str = ""
    """The submitting process, as pid@start."""
    run: str = ""
    """Directory of the run that compiles."""
    job: str = ""
    """Its precompile job; on the local cluster pid@start. Empty until it is submitted."""


class Claim(Frozen):
    """One claim of a key."""

    path: Path
    number: int
    holder: Holder
    uid: int
    """Who owns its file."""
    age_s: float


def newest_claim(cache: Path, key: str) -> Claim | None:
    """Return the claim that counts; None if there is none."""
    claims = sorted(_claims(key_dir(cache, key)))
    for number, path in reversed(claims):
        try:
            status = path.stat()
        except OSError:
            continue  # dropped just now, or no file at all
        age_s = time.time() - status.st_mtime
        return Claim(path=path, number=number, holder=_read(path), uid=status.st_uid, age_s=age_s)
    return None


def take_claim(
    cache: Path, key: str, *, after: Claim | None, host: str, process: str, run: str,
    trusted: Collection[int] = (),
) -> Claim | None:  # fmt: skip
    """Take the claim that follows a stale one; None if somebody else was faster."""
    directory = open_key_dir(cache, key, trusted=trusted)
    number = after.number + 1 if after else 1
    path = directory / f"claim-{number}.json"
    holder = Holder(user=getpass.getuser(), host=host, process=process, run=run)
    try:
        with path.open("x", encoding="utf-8") as stream:
            # Ours, and read by those who can read the cache.
            os.fchmod(stream.fileno(), 0o600 | (cache.stat().st_mode & 0o044))
            json.dump(asdict(holder), stream)
    except FileExistsError:
        return None
    claim = Claim(path=path, number=number, holder=holder, uid=os.getuid(), age_s=0.0)
    for other, old in _claims(directory):
        if other > number:  # the stale one was of long ago: others came and went since
            drop_claim(claim)
            return None
        if other < number:
            with contextlib.suppress(OSError):
                old.unlink()
    return claim


def complete_claim(claim: Claim, job: str) -> None:
    """Write down the job that compiles."""
    whole = asdict(claim.holder) | {"job": job}
    partial = claim.path.with_name(f".{claim.path.name}")
    partial.write_text(json.dumps(whole), encoding="utf-8")
    partial.chmod(claim.path.stat().st_mode)
    partial.rename(claim.path)


def drop_claim(claim: Claim) -> None:
    """Give a claim of ours back: nothing was submitted."""
    claim.path.unlink(missing_ok=True)


def open_key_dir(cache: Path, key: str, *, trusted: Collection[int] = ()) -> Path:
    """Make a key's directory, as open to others as the cache itself; refuse that of others."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = key_dir(cache, key)
    all_keys = cache.stat().st_mode & 0o3777  # everybody who may write to the cache adds keys
    for place, mode in ((directory.parent, all_keys), (directory, mode_for_others(cache))):
        try:
            place.mkdir()
            place.chmod(mode)
        except FileExistsError:
            pass
        except PermissionError:
            for above in (cache, place.parent):
                if not is_trusted(uid := above.stat().st_uid, trusted):
                    raise foreign_place(above, uid) from None
            raise
        refuse_place(place, trusted, cache)
    return directory


def _claims(directory: Path) -> Iterator[tuple[int, Path]]:
    with contextlib.suppress(OSError):  # none yet, or not for us to see
        for path in directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                yield int(match[1]), path


def _read(path: Path) -> Holder:
    said = read_json(path)
    texts = {name: said.get(name) for name in Holder.__dataclass_fields__}
    return Holder(**{n: t for n, t in texts.items() if isinstance(t, str) and t.isprintable()})
