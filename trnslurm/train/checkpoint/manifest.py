"""manifest.json: what a checkpoint is, the checksums of its files, and which runs it fits."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trnslurm.contract.checkpoints import CHECKPOINT_FORMAT, step_of
from trnslurm.saves.manifest import (
    NAME,
    DamagedError,
    check_files,
    hash_files,
    read_manifest,
    sealed,
    unsealed,
)
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan, read_section

# How many names of each kind an error has.
NAMED = 4
_NEWER = ("frozen", "owners", "kept")
_NONE: dict[str, Any] = {"score": {}, "frozen": [], "owners": {}, "kept": {}}


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
        return sealed(values)

    def with_files(self, files: dict[str, Any]) -> "CheckpointManifest":
        """Return the same manifest with these files."""
        return replace(self, files=files)

    @classmethod
    def from_json(cls, content: bytes, *, where: str) -> "CheckpointManifest":
        """Read what to_json wrote."""
        values = _NONE | unsealed(content)  # earlier versions wrote none of these
        if values.get("format") != CHECKPOINT_FORMAT:
            raise TrainError(
                f"{where}: format {values.get('format')}, but this code reads {CHECKPOINT_FORMAT}"
            )
        return read_section(cls, values, where=where)


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint, whole or damaged."""
    return (directory / NAME).is_file()


def check_sizes(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; check that its files exist with the right sizes."""
    content = read_manifest(checkpoint)
    manifest = CheckpointManifest.from_json(content, where=str(checkpoint / NAME))
    if manifest.step != step_of(checkpoint.name):
        raise DamagedError(f"{NAME}: belongs to step {manifest.step}")
    check_files(checkpoint, manifest.files)
    return manifest


def verify(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; check the sha256 of every file."""
    manifest = check_sizes(checkpoint)
    hash_files(checkpoint, manifest.files)
    return manifest


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
