"""Fetches and checks published files once: a tar file of BERT shards, or a single file."""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from trnslurm.prepare.errors import PrepareError
from trnslurm.prepare.fetch.download import download, file_name
from trnslurm.prepare.fetch.fetched import Fetched
from trnslurm.prepare.files import partial, publish, read_json, replacing
from trnslurm.prepare.pipeline import import_late
from trnslurm.prepare.progress import Progress

NOTES = "published.json"
FORMAT = 1
SHARD = ".hdf5"


def fetch(
    url: str, output: Path, *, shards: bool, seq_len: int | None, max_pred: int | None, force: bool
) -> Fetched:
    """Fetch the file if it is not there yet.

    With `shards` the file is a tar file of shards to unpack, whose samples have the given shape.
    """
    if not url.startswith(("http://", "https://")) or not file_name(url):
        raise PrepareError(f"--url {url}: must be the http:// or https:// URL of a file")
    if is_there(output, url, NOTES, force=force):
        return Fetched(output)
    check = import_late("bert.check") if shards else None  # before anything is fetched
    with partial(output, hashlib.sha256(url.encode()).hexdigest()[:16]) as directory:
        file = download(url, directory, unpacked=shards)
        finished = directory / "finished"
        finished.mkdir(exist_ok=True)
        if check is not None:
            _unpack(file, finished, url)
            what = check.check_shards(
                finished, whole=False, seq_len=seq_len, max_pred=max_pred, source=url
            )
        else:
            what = f"{file.stat().st_size:,} bytes"
            file.rename(finished / file.name)
        files = {path.name: path.stat().st_size for path in sorted(finished.iterdir())}
        with replacing(finished / NOTES) as stream:
            notes = {"format": FORMAT, "url": url, "files": files}
            stream.write(f"{json.dumps(notes, indent=2)}\n".encode())
        publish(finished, output)
    return Fetched(output, what)


def is_there(output: Path, url: str, name: str, *, force: bool) -> bool:
    """Check whether it was fetched completely before; refuse to replace anything else.

    `name` is the name of the notes that a fetch leaves.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    notes = _read_notes(output / name)
    if notes is None:
        raise PrepareError(f"{output} already exists and was not fetched: choose another name")
    if force:
        return False
    if notes["url"] != url:
        raise PrepareError(
            f"{output} was fetched from {notes['url']}: choose another name, or replace it with "
            "--force"
        )
    _refuse_damage(output, notes)
    return True


def verify(directory: Path) -> str:
    """Read published shards completely; return a one-line summary."""
    if notes := _read_notes(directory / NOTES):
        _refuse_damage(directory, notes)
    return str(import_late("bert.check").check_shards(directory, whole=True))


def _refuse_damage(directory: Path, notes: dict[str, Any]) -> None:
    """Raise a PrepareError if a file's size has changed since it was fetched."""
    for name, size in notes["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise PrepareError(f"{directory}: {name} is damaged: fetch it again with --force")


def _read_notes(path: Path) -> dict[str, Any] | None:
    notes = read_json(path)
    is_ours = isinstance(notes, dict) and notes.get("format") == FORMAT
    return notes if is_ours and isinstance(notes.get("files"), dict) and "url" in notes else None


def _unpack(archive: Path, finished: Path, url: str) -> None:
    """Unpack the shards, without their directories, and nothing else.

    Only names and contents are used, so no path, link, owner or mode can do harm in any version of
    Python. Shards that an earlier run unpacked stay.
    """
    progress = Progress("unpacking", archive.stat().st_size)
    names: set[str] = set()
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                odd = (
                    "which leads outside of it" if path.is_absolute() or ".." in path.parts else ""
                )
                odd = odd or ("" if member.isfile() or member.isdir() else "which is not a file")
                if odd:
                    raise PrepareError(
                        f"{url}: not unpacked, because it contains {member.name}, {odd}"
                    )
                if member.isfile() and path.suffix == SHARD and not path.name.startswith("."):
                    if path.name in names:
                        raise PrepareError(
                            f"{url}: not unpacked, because it contains two shards {path.name}"
                        )
                    names.add(path.name)
                    _unpack_one(tar, member, finished / path.name)
                progress.show(member.offset_data + member.size)
    except (tarfile.TarError, EOFError) as error:
        raise PrepareError(f"{url}: not a complete tar file ({error}): fetch it again") from None
    progress.finish()


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    if target.is_file() and target.stat().st_size == member.size:
        return
    source = tar.extractfile(member)
    assert source is not None  # it is a file
    with source, replacing(target) as stream:
        shutil.copyfileobj(source, stream)
