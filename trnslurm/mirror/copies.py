"""Copies: which checkpoints are on disk, which are in S3, and how to copy between them.

    RUN/run.json, config.yaml, code.tar.gz       what is needed to continue without the file system
    RUN/checkpoints/step-00000020/…              the files of a checkpoint
    RUN/checkpoints/step-00000020.json           their sizes and checksums

The last file is written after all others. Without it the copy does not exist.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trnslurm.contract.checkpoints import (
    checkpoint_name,
    checkpoints_in,
    found,
    newest,
    step_of,
)
from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import CHECKPOINTS, PACKAGE, RECORD, RunFiles
from trnslurm.mirror.store import ChangedError, MirrorError, Store, sha256_of

CODE = "code.tar.gz"
_OURS = (Path(PACKAGE).stem, Path(PACKAGE).name)
MOST_BYTES = 128 << 20
"""The size limit for files that are not checkpoints."""
_MOST_RECORD = 32 << 20
"""The size limit for a copy's sizes and checksums: enough for 100,000 files."""
_FORMAT = 1
_IDENTITY = ("run", "created", "user", "host")
_MANIFEST = "manifest.json"  # as trnslurm.train.checkpoint writes it
_FETCHING = ".fetching-{}"


class OnDisk(NamedTuple):
    """A checkpoint of the run."""

    step: int
    path: Path
    """A directory, or a custom script's file."""
    where: str
    """The path as a copy stores it: relative to the run directory if it is inside."""
    files: frozenset[tuple[str, int, int]]
    """Name within the path's directory, bytes and mtime_ns of each file."""

    @property
    def root(self) -> Path:
        """Return the directory to which the files' names are relative."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self.files)

    def is_in(self, copy: Mapping[str, Any] | None) -> bool:
        """Check whether a copy consists of exactly these files."""
        known = copy["files"] if copy else {}
        return self.files == {(n, file["bytes"], file["mtime_ns"]) for n, file in known.items()}


def on_disk(run: RunFiles) -> list[OnDisk]:
    """Return the checkpoints of a run, newest first.

    For a custom script, this is the checkpoint that it reported last, or that its library wrote.
    """
    if not run.project_file.exists():
        whole = [p for p in checkpoints_in(run.checkpoints) if (p / _MANIFEST).is_file()]
        found = (_look(run, step_of(path.name) or 0, path) for path in whole)
        return [one for one in found if one]
    last = newest(run)
    one = _look(run, last.step, last.path) if last and last.is_alone else None
    return [one] if one else []


def not_copied(run: RunFiles) -> str:
    """Return which checkpoint of a custom script has no copy, and why; empty if there is none."""
    last = newest(run) if run.project_file.exists() else None
    if not run.project_file.exists() or (last and last.is_alone):
        return ""
    if last:
        why = (
            "its directory contains other checkpoints"
            if last.step
            else "its name does not contain a step"
        )
        return f"{last.path.name} of {last.form} is not copied: {why}: call trnslurm.saved()"
    left = found(run)
    return f"{left} is not copied: the script does not resume from a checkpoint" if left else ""


def _look(run: RunFiles, step: int, path: Path) -> OnDisk | None:
    """Return a checkpoint, or None if it is being deleted."""
    home = run.path.absolute()
    path = path.absolute()
    where = str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
    try:
        files = frozenset(_files_in(path) if path.is_dir() else [_stat(path, path.parent)])
    except FileNotFoundError:
        return None
    return OnDisk(step, path, where, files) if files else None


def _files_in(directory: Path) -> Iterator[tuple[str, int, int]]:
    def fail(error: OSError) -> None:
        raise error

    for place, below, names in os.walk(directory, onerror=fail):
        for name in below:
            if Path(place, name).is_symlink():
                raise MirrorError(f"{place}/{name}: links to directories are not copied")
        yield from (_stat(Path(place, name), directory) for name in names)


def _stat(file: Path, root: Path) -> tuple[str, int, int]:
    if file.is_symlink() and not file.exists():
        raise MirrorError(f"{file} is a broken link")
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MirrorError(f"{file} is not a regular file")
    return str(file.relative_to(root)), found.st_size, found.st_mtime_ns


def name_of(step: int) -> str:
    """Return the name of a step's copy. With .json, it is the name of the file written last."""
    return f"{CHECKPOINTS}/{checkpoint_name(step)}"


def known_copies(store: Store) -> dict[int, dict[str, Any]]:
    """Return S3's record of each complete copy, by step."""
    found = {}
    for name in store.names(f"{CHECKPOINTS}/", here=True):
        step = step_of(PurePosixPath(name).stem) if name.endswith(".json") else None
        if step is not None:
            found[step] = read_copy(store, step)
    return {step: copy for step, copy in found.items() if copy}


def read_copy(store: Store, step: int) -> dict[str, Any]:
    """Return the file written last of a copy; empty if it is damaged."""
    try:
        copy = json.loads(store.read(f"{name_of(step)}.json", _MOST_RECORD) or b"{}")
        whole = copy["format"] == _FORMAT and copy["step"] == step and isinstance(copy["path"], str)
        for name, file in copy["files"].items():
            whole = whole and _is_inside(name) and isinstance(file["sha256"], str)
            whole = whole and isinstance(file["bytes"], int) and isinstance(file["mtime_ns"], int)
    except (ChangedError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(copy) if whole and copy["files"] else {}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name == str(path) and name != "."


def send(store: Store, one: OnDisk, copy: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy the missing parts of a checkpoint to S3; return the record that is written last.

    `copy` is the copy of this step in S3, if there is one.
    """
    name = name_of(one.step)
    if copy:  # it has other bytes, and while it changes there must be no copy
        store.remove(f"{name}.json")
    store.remove(f"{name}/", keep={f"{name}/{file}" for file, _, _ in one.files})
    known = read_json(one.root / _MANIFEST).get("files")
    files = {}
    for file, size, mtime_ns in sorted(one.files, key=lambda each: (each[0] == _MANIFEST, each)):
        listed = known.get(file) if isinstance(known, dict) else None
        told = listed.get("sha256") if isinstance(listed, dict) else None
        sha256 = told if isinstance(told, str) else sha256_of(one.root / file)
        store.send(one.root / file, f"{name}/{file}", sha256)
        files[file] = {"bytes": size, "sha256": sha256, "mtime_ns": mtime_ns}
    if {_stat(one.root / file, one.root) for file, _, _ in one.files} != one.files:
        raise ChangedError(f"{one.path} changed while it was being copied")
    kind = "directory" if one.path.is_dir() else "file"
    last = {"format": _FORMAT, "step": one.step, "path": one.where, "kind": kind, "files": files}
    store.write(f"{name}.json", f"{json.dumps(last, indent=1)}\n".encode())
    return last


def remove(store: Store, step: int) -> None:
    """Remove a copy, starting with the file that makes it exist."""
    store.remove(f"{name_of(step)}.json")
    store.remove(f"{name_of(step)}/")


def strays(store: Store, run: RunFiles, copies: Mapping[int, object]) -> list[int]:
    """Return the steps that are incomplete in S3 and missing in the run.

    Other objects are left alone. For example, S3's console makes an empty object, `checkpoints/`,
    for a folder (docs.aws.amazon.com/AmazonS3/latest/userguide/using-folders.html).
    """
    known = {*copies, *(one.step for one in on_disk(run))}
    prefix = f"{CHECKPOINTS}/"
    below = (name.removeprefix(prefix).partition("/")[0] for name in store.all_names(prefix))
    steps = {step_of(name.removesuffix(".json")) for name in below}
    return sorted(step for step in steps if step is not None and step not in known)


def outdated(run: RunFiles, copies: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the steps whose checkpoints the run has deleted or replaced since they were copied.

    `copies` has all complete ones that are on disk. The newest of these always stays.
    """
    paths = {copy["path"]: step for step, copy in sorted(copies.items())}
    whole = (one for one in on_disk(run) if one.is_in(copies.get(one.step)))
    newest = max((one.step for one in whole), default=0)
    return [
        step
        for step, copy in copies.items()
        if step < newest and (paths[copy["path"]] != step or not (run.path / copy["path"]).exists())
    ]


def send_run(store: Store, run: RunFiles) -> None:
    """Copy what is needed to continue elsewhere: record, configuration and the job's own code."""
    own = read_json(run.record_file)
    try:
        there = json.loads(store.read(RECORD, MOST_BYTES) or b"{}")
    except ValueError:
        there = {}
    if there and [there.get(key) for key in _IDENTITY] != [own.get(key) for key in _IDENTITY]:
        raise MirrorError(f"{store.place} contains the copies of another run: set another mirror")
    for file in filter(Path.exists, (run.record_file, run.config_file)):
        store.write(file.name, file.read_bytes())
    store.write(CODE, _packed(run.code))


def _packed(code: Path) -> bytes:
    """Return the code except trnslurm's, which exists wherever the run continues."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for file in sorted(code.rglob("*")):
            name = file.relative_to(code)
            if name.parts[0] not in _OURS and file.is_file() and "__pycache__" not in name.parts:
                archive.add(file, str(name), recursive=False)
    return out.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    """Return the files of such an archive; raise a MirrorError if it is anything else."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                left = MOST_BYTES - sum(map(len, found.values()))
                if not file or not _is_inside(member.name) or member.size > left:
                    raise MirrorError(f"{CODE}: {member.name!r} is not a file of a run's code")
                found[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise MirrorError(f"{CODE} is damaged ({error})") from None
    return found


def fetch(store: Store, run: RunFiles, copy: Mapping[str, Any]) -> Path:
    """Put a copy where the run expects its checkpoint, and return the path.

    Files that an interrupted call has fetched are not fetched again.
    """
    step, where = copy["step"], PurePosixPath(copy["path"])
    inside = _is_inside(copy["path"])
    target = run.path / where if inside else run.checkpoints / where.name
    temporary = run.path / _FETCHING.format(checkpoint_name(step))
    whole = temporary if copy["kind"] == "directory" else temporary / target.name
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        _check_there(target, copy)
    else:

        def fetch_one(name: str) -> None:
            file, known = temporary / name, copy["files"][name]
            file.parent.mkdir(parents=True, exist_ok=True)
            there = file.is_file() and file.stat().st_size == known["bytes"]
            if not there or sha256_of(file) != known["sha256"]:
                store.fetch(f"{name_of(step)}/{name}", file, known["bytes"], known["sha256"])
            os.utime(file, ns=(known["mtime_ns"], known["mtime_ns"]))

        store.together(fetch_one, [*copy["files"]])
        target.parent.mkdir(parents=True, exist_ok=True)
        whole.rename(target)
        _fsync(target.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    if run.project_file.exists():
        write_json(run.saved_file, {"step": step, "path": str(target.absolute()), "attempt": 0})
    return target


def _check_there(target: Path, copy: Mapping[str, Any]) -> None:
    """Reject existing files in a checkpoint's place, unless an earlier attempt fetched them."""
    root = target if copy["kind"] == "directory" else target.parent
    for name, known in copy["files"].items():
        file = root / name
        if not file.is_file() or sha256_of(file) != known["sha256"]:
            raise MirrorError(
                f"{target}: other files are where the checkpoint belongs: move them away"
            )


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
