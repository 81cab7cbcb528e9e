"""Fetches files under a prefix in S3, resumes where they were cut off, and checks checksums."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from trnslurm.mirror.store import ChangedError, MirrorError, Object, Store
from trnslurm.prepare.errors import KeptError, PrepareError
from trnslurm.prepare.fetch import published
from trnslurm.prepare.fetch.fetched import Fetched
from trnslurm.prepare.files import partial, publish, read_json, replacing
from trnslurm.prepare.prepared import find_damage, read_index
from trnslurm.prepare.progress import Progress

NOTES = ".s3.json"  # hidden, so that no reader mistakes it for data
_LISTING = "listing.json"
# What botocore and S3 report -> what to do.
_HINTS = {
    "Unable to locate credentials": "give this host a role, or a profile with `aws configure`",
    "NoSuchBucket": "check the name",
    "AccessDenied": "the role or profile needs s3:ListBucket and s3:GetObject",
    "ExpiredToken": "sign in again",
    "PreconditionFailed": "the object has changed in the meantime",
}


def fetch(place: str, output: Path, *, force: bool) -> Fetched:
    """Fetch the object s3://BUCKET/KEY, or all under s3://BUCKET/PREFIX, unless it is there."""
    place = place.rstrip("/")
    if published.is_there(output, place, NOTES, force=force):
        return Fetched(output)
    try:
        store, found = _listed(place)
    except MirrorError as error:
        raise PrepareError(_with_hint(f"{place}: {error}")) from None
    with partial(output, hashlib.sha256(place.encode()).hexdigest()[:16]) as directory:
        finished = directory / "finished"
        _forget_changed(directory, finished, found)
        unchecked = _fetch_all(store, found, finished)
        _refuse_partial(finished, place)
        with replacing(finished / NOTES) as stream:
            notes = {"format": published.FORMAT, "url": place}
            notes["files"] = {each.name: each.bytes for each in found}
            stream.write(f"{json.dumps(notes, indent=2)}\n".encode())
        publish(finished, output)
    words = f"{len(found):,} files, {sum(each.bytes for each in found):,} bytes"
    words += f", {unchecked:,} of them without a checksum in S3" if unchecked else ""
    if read_index(output):
        words += f": prepared data, for --set data.path={output}"
    return Fetched(output, words)


def _listed(place: str) -> tuple[Store, list[Object]]:
    """Return the objects under a place, or if there are none, the object of that name."""
    store = Store(place)
    found = [each for each in store.objects() if not each.name.endswith("/")]
    above, _, name = place.rpartition("/")
    if not found and above != "s3:/":
        store = Store(above)
        found = [each for each in [store.find(name)] if each]
    if not found:
        raise MirrorError("there is nothing there: check with `aws s3 ls`")
    names = {each.name for each in found}
    for each in found:
        path = PurePosixPath(each.name)
        inside = str(path) == each.name and not path.is_absolute() and ".." not in path.parts
        if not inside or not each.name.isprintable():
            raise MirrorError(
                f"the key {each.name!r} is not a valid file name: rename or remove it"
            )
        if above := next((str(up) for up in path.parents if str(up) in names), ""):
            raise MirrorError(
                f"the key {above} is the directory of {path.name}: rename one of them"
            )
    return store, [each for each in found if each.name != NOTES]


def _forget_changed(directory: Path, finished: Path, found: list[Object]) -> None:
    """Remove files from an earlier run whose objects have changed or are gone."""
    before = read_json(directory / _LISTING)
    known = before if isinstance(before, dict) else {}
    now = {each.name: [each.bytes, each.etag] for each in found}
    finished.mkdir(exist_ok=True)
    for path in finished.rglob("*"):
        name = str(path.relative_to(finished))
        if path.is_file() and (name not in now or known.get(name) != now[name]):
            path.unlink()
    with replacing(directory / _LISTING) as stream:
        stream.write(json.dumps(now).encode())


def _fetch_all(store: Store, found: list[Object], finished: Path) -> int:
    """Fetch missing files, a few at a time; return how many have no checksum."""
    total = sum(each.bytes for each in found)
    have = sum(path.stat().st_size for path in finished.rglob("*") if path.is_file())
    free = shutil.disk_usage(finished).free
    if free < total - have:
        raise KeptError(
            f"{finished.parent.parent}: no space for {(total - have) / 1e9:,.1f} GB, only "
            f"{free / 1e9:,.1f} GB are free"
        )
    progress, showing = Progress("fetching", total, before=have), threading.Lock()
    ended = threading.Event()
    unchecked = []

    def moved() -> None:
        if ended.is_set():
            raise MirrorError("ended")
        with showing:
            progress.show(have + store.moved)

    def fetch_one(each: Object) -> None:
        path = finished / each.name
        if ended.is_set():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _ending(ended, path):
            while True:
                before = path.stat().st_size if path.exists() else 0
                try:
                    if not store.fetch_rest(each, path):
                        unchecked.append(each.name)
                    return
                except MirrorError as error:  # continue as long as it makes progress
                    if isinstance(error, ChangedError) or path.stat().st_size == before:
                        raise

    store.on_move = moved
    try:
        store.together(fetch_one, found)
    except MirrorError as error:
        raise KeptError(_with_hint(f"{store.place}: {error}")) from None
    finally:
        ended.set()  # for the other files, after an error or a signal
    progress.finish()
    return len(unchecked)


@contextmanager
def _ending(ended: threading.Event, path: Path) -> Iterator[None]:
    """Stop fetching all files at the first error; remove a file whose object has changed."""
    try:
        yield
    except BaseException as error:
        ended.set()
        if isinstance(error, ChangedError):
            path.unlink(missing_ok=True)
        raise


def _refuse_partial(finished: Path, place: str) -> None:
    """Reject prepared data in S3 that does not match its index."""
    index = read_index(finished)
    if index and (damaged := find_damage(finished, index)):
        raise PrepareError(
            f"{place}: {damaged} does not match index.json: copy the prepared directory to S3 again"
        )


def _with_hint(words: str) -> str:
    hint = next((hint for said, hint in _HINTS.items() if said in words), "")
    return f"{words}: {hint}" if hint else words
