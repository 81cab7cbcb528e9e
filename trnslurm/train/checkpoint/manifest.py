"""manifest.json: what a checkpoint is, the checksums of its files, and which runs it fits."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trnslurm.contract.checkpoints import CHECKPOINT_FORMAT, step_of
from trnslurm.contract.files import open_file
from trnslurm.train.checkpoint.directory import fsync_directory, fsync_file
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan, read_section

NAME = "manifest.json"
# How many names of each kind an error has.
NAMED = 4
_NEWER = ("frozen", "owners", "kept")
_NONE: dict[str, Any] = {"score": {}, "frozen": [], "owners": {}, "kept": {}}
# hashlib lets other threads run; no disk feeds more threads than these.
HASH_THREADS = 8


class DamagedError(Exception):
    """A checkpoint that is not what its manifest says, or has none; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """One checkpoint."""

    format: int
    step: int
    """Optimizer steps done."""
    samples: int
    """Samples of the stream consumed; the next step begins with the one of this number."""
    attempt: int
    workers: int
    """How many workers wrote it; any number can read it."""
    device: str
    facts: dict[str, Any]
    """What a run must have in common with it to resume from it."""
    settings: dict[str, Any]
    """Values that may change between attempts; loading prints the changes."""
    kinds: list[str]
    shapes: dict[str, Any]
    """Of every parameter, by name."""
    frozen: list[str] = field(default_factory=list)
    """The parameters that were not trained, and have no optimizer state."""
    owners: dict[str, Any] = field(default_factory=dict)
    """Parameters that are whole in one worker's file, with their state, and which worker's."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Further tensors that the job keeps: by kind, the shape of each by name."""
    files: dict[str, Any]
    """Each file's bytes and sha256."""
    score: dict[str, Any] = field(default_factory=dict)
    """The score by which the best checkpoint is kept, by name, if there is one."""

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file["bytes"] for file in self.files.values())

    def to_json(self) -> bytes:
        """Return it as JSON, with a checksum of itself."""
        values = asdict(self)
        for key in _NEWER:
            if not values[key]:  # versions that do not know it read the manifest, too
                del values[key]
        return json.dumps(values | {"sha256": _checksum(values)}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, *, where: str) -> "CheckpointManifest":
        """Read what to_json wrote."""
        try:
            values = json.loads(content)
            checksum = values.pop("sha256")
            intact = checksum == _checksum(values)
            values = _NONE | values  # earlier versions wrote none of these
        except (ValueError, KeyError, AttributeError, TypeError):
            values, intact = {}, False
        if not intact:
            raise DamagedError(f"{NAME}: not as it was written")
        if values.get("format") != CHECKPOINT_FORMAT:
            raise TrainError(
                f"{where}: format {values.get('format')}, but this code reads {CHECKPOINT_FORMAT}"
            )
        return read_section(cls, values, where=where)


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def file_name(worker: int, workers: int) -> str:
    """Return the name of a worker's file."""
    return f"rank-{worker:05d}-of-{workers:05d}.safetensors"


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest next to the durable files; then only the final name is missing."""
    with (directory / NAME).open("wb") as file:
        file.write(manifest.to_json())
        fsync_file(file)
    fsync_directory(directory)


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint, whole or damaged."""
    return (directory / NAME).is_file()


def check_sizes(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; check that its files exist with the right sizes."""
    try:
        with open_file(checkpoint / NAME) as file:
            content = file.read()
    except OSError as error:
        raise DamagedError(f"{NAME}: {error.strerror}") from None
    manifest = CheckpointManifest.from_json(content, where=str(checkpoint / NAME))
    if manifest.step != step_of(checkpoint.name):
        raise DamagedError(f"{NAME}: it is for step {manifest.step}")
    check_files(checkpoint, manifest)
    return manifest


def check_files(directory: Path, manifest: CheckpointManifest) -> None:
    """Check that the files of a manifest are in a directory with the right sizes."""
    for name, file in manifest.files.items():
        if Path(name).name != name:
            raise DamagedError(f"{NAME}: {name!r} is not the name of a file next to it")
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if size != file["bytes"]:
            raise DamagedError(f"{name}: {size:,} bytes instead of {file['bytes']:,}")


def verify(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; check the sha256 of every file."""
    manifest = check_sizes(checkpoint)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = pool.map(lambda name: _hash_file(checkpoint / name), manifest.files)
        for (name, file), sha256 in zip(manifest.files.items(), hashes, strict=True):
            if sha256 != file["sha256"]:
                raise DamagedError(f"{name}: its sha256 is not as in the manifest")
    return manifest


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from None


def facts_of(plan: JobPlan, more: dict[str, Any]) -> dict[str, Any]:
    """Collect the values that decide a step's samples, its randomness and its computation."""
    facts = {
        "recipe": plan.recipe,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "seq_len": plan.seq_len,
        "seed": plan.seed,
    }
    return _as_read(facts | {f"model.{key}": value for key, value in plan.model.items()} | more)


def settings_of(plan: JobPlan) -> dict[str, Any]:
    """Collect the values that a user may change between attempts, though they change the losses."""
    train = {f"train.{key}": value for key, value in plan.train.items()}
    return _as_read({"steps": plan.steps, "precision": plan.precision, **train})


def _as_read(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are read from JSON, which has no tuples."""
    read: dict[str, Any] = json.loads(json.dumps(values))
    return read


def shorten(words: list[str]) -> list[str]:
    """Return the first words, and how many more there are."""
    more = len(words) - NAMED
    return [*words[:NAMED], f"and {more} more"] if more > 0 else words


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the changed values, one phrase each."""
    return [
        f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
        for key in {**saved, **now}
        if saved.get(key) != now.get(key)
    ]
