"""Published files: a tar of BERT's shards, or a single file, fetched and checked once."""

import hashlib
import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch.download import download, file_name
from trnslurm.prepare.files import partial, publish, read_json, replacing
from trnslurm.prepare.pipeline import import_late
from trnslurm.prepare.progress import Progress

NOTES = "published.json"
FORMAT = 1
SHARD = ".hdf5"


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """What to fetch."""

    url: str
    output: Path
    shards: bool
    """Whether it is a tar of shards, to be unpacked."""
    seq_len: int | None
    max_pred: int | None
    force: bool


def fetch(wanted: PublishedFile) -> str:
    """Fetch what is not there; return in one line what was done."""
    if not wanted.url.startswith(("http://", "https://")) or not file_name(wanted.url):
        raise PrepareError(f"--url {wanted.url}: must be the http:// or https:// URL of a file")
    if _is_there(wanted):
        return f"{wanted.output} is already fetched, nothing to do"
    check = import_late("bert.check") if wanted.shards else None  # before anything is fetched
    key = hashlib.sha256(wanted.url.encode()).hexdigest()[:16]
    with partial(wanted.output, key) as directory:
        file = download(wanted.url, directory, unpacked=wanted.shards)
        finished = directory / "finished"
        finished.mkdir(exist_ok=True)
        if check is not None:
            _unpack(file, finished, wanted.url)
            shards = check.check_shards(finished, whole=False)
            shards.require(wanted.seq_len, wanted.max_pred, wanted.url)
            what = str(shards)
        else:
            what = f"{file.stat().st_size:,} bytes"
            file.rename(finished / file.name)
        files = {path.name: path.stat().st_size for path in sorted(finished.iterdir())}
        with replacing(finished / NOTES) as stream:
            notes = {"format": FORMAT, "url": wanted.url, "files": files}
            stream.write(f"{json.dumps(notes, indent=2)}\n".encode())
        publish(finished, wanted.output)
    return f"Fetched {wanted.output}: {what}"


def _is_there(wanted: PublishedFile) -> bool:
    """Return whether it was fetched before, whole; refuse to replace what was not fetched."""
    output = wanted.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    notes = _read_notes(output)
    if notes is None:
        raise PrepareError(f"{output}: exists, and was not fetched: choose another name")
    if wanted.force:
        return False
    if notes["url"] != wanted.url:
        raise PrepareError(
            f"{output}: was fetched from {notes['url']}: choose another name, or replace it with "
            "--force"
        )
    if damaged := _find_damage(output, notes):
        raise PrepareError(f"{output}: {damaged} is damaged: fetch it again with --force")
    return True


def verify(directory: Path) -> str:
    """Read published shards whole; return in one line what they are."""
    notes = _read_notes(directory)
    if notes is not None and (damaged := _find_damage(directory, notes)):
        raise PrepareError(f"{directory}: {damaged} is damaged: fetch it again with --force")
    return str(import_late("bert.check").check_shards(directory, whole=True))


def _find_damage(directory: Path, notes: dict[str, Any]) -> str | None:
    """Return the name of a file whose size is not that when it was fetched, if there is one."""
    for name, size in notes["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            return str(name)
    return None


def _read_notes(directory: Path) -> dict[str, Any] | None:
    notes = read_json(directory / NOTES)
    is_ours = isinstance(notes, dict) and notes.get("format") == FORMAT
    return notes if is_ours and isinstance(notes.get("files"), dict) and "url" in notes else None


def _unpack(archive: Path, finished: Path, url: str) -> None:
    """Unpack the shards, without their directories, and nothing else.

    Only their names and contents are used, so no path, link, owner or mode can do harm, whatever
    the version of Python. What an earlier run unpacked is left as it is.
    """
    progress = Progress("unpacking", archive.stat().st_size)
    names: set[str] = set()
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                odd = "which leads elsewhere" if path.is_absolute() or ".." in path.parts else ""
                odd = odd or ("" if member.isfile() or member.isdir() else "which is no file")
                if odd:
                    raise PrepareError(f"{url}: has {member.name} in it, {odd}: not unpacked")
                if member.isfile() and path.suffix == SHARD and not path.name.startswith("."):
                    if path.name in names:
                        raise PrepareError(f"{url}: has two shards {path.name}: not unpacked")
                    names.add(path.name)
                    _unpack_one(tar, member, finished / path.name)
                progress.show(member.offset_data + member.size)
    except (tarfile.TarError, EOFError) as error:
        raise PrepareError(f"{url}: no whole tar ({error}): fetch it again") from None
    progress.finish()


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    if target.is_file() and target.stat().st_size == member.size:
        return
    source = tar.extractfile(member)
    assert source is not None  # it is a file
    with source, replacing(target) as stream:
        shutil.copyfileobj(source, stream)
