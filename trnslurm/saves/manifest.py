"""manifest.json, written last, with the size and sha256 of each file in a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from trnslurm.contract.checkpoints import step_of
from trnslurm.contract.files import open_file, sha256_of
from trnslurm.saves.directory import fsync_directory, fsync_file

NAME = "manifest.json"
OF_SCRIPTS = "trnslurm.save/1"
"""The format of checkpoints that trnslurm.save writes."""
# hashlib lets other threads run; no disk feeds more threads than these.
HASH_THREADS = 8

Files = Mapping[str, Any]
"""The size in bytes and the sha256 of each file, by name."""


class DamagedError(Exception):
    """A checkpoint does not match its manifest, or has none. The message names the file."""


class Manifest(Protocol):
    """What a save needs to know about a manifest."""

    @property
    def step(self) -> int:
        """The step of the checkpoint."""

    @property
    def attempt(self) -> int:
        """The attempt that writes it."""

    @property
    def files(self) -> dict[str, Any]:
        """The size in bytes and the sha256 of each file, by name."""

    def with_files(self, files: dict[str, Any]) -> Manifest:
        """Return the same manifest with these files."""

    def to_json(self) -> bytes:
        """Return the manifest as JSON that includes its own checksum."""


def file_name(worker: int, workers: int) -> str:
    """Return the name of a worker's file."""
    return f"rank-{worker:05d}-of-{workers:05d}.safetensors"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest next to the durable files, so that only the final rename is missing."""
    with (directory / NAME).open("wb") as file:
        file.write(manifest.to_json())
        fsync_file(file)
    fsync_directory(directory)


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return a manifest's JSON, including its own checksum."""
    return json.dumps({**values, "sha256": _checksum(values)}, indent=1).encode()


def unsealed(content: bytes) -> dict[str, Any]:
    """Return the sealed values; raise a DamagedError if they have changed since."""
    try:
        values: dict[str, Any] = json.loads(content)
        checksum = values.pop("sha256")
        if checksum == _checksum(values):
            return values
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise DamagedError(f"{NAME}: does not match its checksum")


def read_manifest(checkpoint: Path) -> bytes:
    """Return the raw content of a checkpoint's manifest."""
    try:
        with open_file(checkpoint / NAME) as file:
            return file.read()
    except OSError as error:
        raise DamagedError(f"{NAME}: {error.strerror}") from None


def check_sizes(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest; check that its files exist and have the right sizes."""
    values = unsealed(read_manifest(checkpoint))
    if values.get("step") != step_of(checkpoint.name):
        raise DamagedError(f"{NAME}: belongs to step {values.get('step')}")
    check_files(checkpoint, values["files"])
    return values


def check_files(directory: Path, files: Files) -> None:
    """Check that a directory has the files of a manifest, with the right sizes."""
    for name, file in files.items():
        if Path(name).name != name:
            raise DamagedError(f"{NAME}: {name!r} is not the name of a file in the same directory")
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if size != file["bytes"]:
            raise DamagedError(f"{name}: {size:,} bytes instead of {file['bytes']:,}")


def hash_files(directory: Path, files: Files) -> None:
    """Check the sha256 of the files in a manifest."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = pool.map(lambda name: _hash_file(directory / name), files)
        for (name, file), sha256 in zip(files.items(), hashes):
            if sha256 != file["sha256"]:
                raise DamagedError(f"{name}: its sha256 does not match the manifest")


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    try:
        with open_file(path) as file:
            return sha256_of(file)
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from None
