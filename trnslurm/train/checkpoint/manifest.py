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
    """The number of completed optimizer steps."""
    samples: int
    """The number of samples consumed, which is also the position where the next step begins."""
    attempt: int
    workers: int
    """How many workers wrote it. Any number of workers can read it."""
    device: str
    facts: dict[str, Any]
    """What a run must have in common with the checkpoint to resume from it."""
    settings: dict[str, Any]
    """Values that may change between attempts. Changes are printed when it is loaded."""
    kinds: list[str]
    shapes: dict[str, Any]
    """The shape of every parameter, by name."""
    frozen: list[str] = field(default_factory=list)
    """The parameters that were not trained and have no optimizer state."""
    owners: dict[str, Any] = field(default_factory=dict)
    """Parameters that are complete, with their state, in one worker's file -> that worker."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Additional tensors that the job keeps: kind -> name -> shape."""
    files: dict[str, Any]
    """Each file's size in bytes and sha256."""
    score: dict[str, Any] = field(default_factory=dict)
    """The name and value of the score that selects the best checkpoint, if there is one."""

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file["bytes"] for file in self.files.values())

    def to_json(self) -> bytes:
        """Return the manifest as JSON that includes its own checksum."""
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
    """Return whether a directory is a checkpoint, complete or damaged."""
    return (directory / NAME).is_file()


def check_sizes(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; check that its files exist and have the right sizes."""
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
    """Collect the values that determine a step's samples, its randomness and its computation."""
    facts = {
        "recipe": plan.recipe,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "seq_len": plan.seq_len,
        "seed": plan.seed,
    }
    return _as_read(facts | {f"model.{key}": value for key, value in plan.model.items()} | more)


def settings_of(plan: JobPlan) -> dict[str, Any]:
    """Collect the values that a user may change between attempts, even though losses change."""
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
    """Return a phrase for each changed value."""
    return [
        f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
        for key in {**saved, **now}
        if saved.get(key) != now.get(key)
    ]
