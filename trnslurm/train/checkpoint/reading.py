"""Reads checkpoints: the newest complete one, the best one, or only the parameters."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from trnslurm.contract.checkpoints import checkpoint_name, checkpoints_in, step_of
from trnslurm.saves.manifest import DamagedError
from trnslurm.train.checkpoint.manifest import CheckpointManifest, check_sizes, verify
from trnslurm.train.checkpoint.state import num_rows
from trnslurm.train.checkpoint.tensors import open_rows
from trnslurm.train.errors import TrainError


class OnUse(Mapping[str, Tensor]):
    """Parameters by name, each read when it is used, so that nobody holds all of them."""

    shapes: Mapping[str, Any]
    """The shape of each parameter."""

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a parameter, without reading it."""
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.shapes)


class Parameters(OnUse):
    """The parameters in a checkpoint, in the type they were saved in."""

    def __init__(self, checkpoint: Path, manifest: CheckpointManifest) -> None:
        self.shapes = manifest.shapes
        self._read = parameter_reader(checkpoint, manifest)

    def __getitem__(self, name: str) -> Tensor:
        """Return a complete parameter."""
        return self._read(name)


def newest_whole(root: Path) -> tuple[CheckpointManifest | None, list[tuple[Path, str]]]:
    """Return the newest complete checkpoint, and the newer, damaged ones with the reasons."""
    damaged: list[tuple[Path, str]] = []
    for checkpoint in checkpoints_in(root):
        try:
            return verify(checkpoint), damaged
        except DamagedError as error:
            damaged.append((checkpoint, str(error)))
    return None, damaged


def prove(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; raise a TrainError unless every checksum matches."""
    if step_of(checkpoint.name) is None:
        raise TrainError(
            f"{checkpoint} is not a checkpoint: name a directory such as {checkpoint_name(100)}"
        )
    if not checkpoint.is_dir():
        raise TrainError(f"{checkpoint}: no such checkpoint")
    try:
        return verify(checkpoint)
    except DamagedError as error:
        raise TrainError(f"{checkpoint} is damaged ({error}): use another one") from None


def parameter_reader(
    checkpoint: Path, manifest: CheckpointManifest, kind: str = "parameter"
) -> Callable[[str], Tensor]:
    """Return a function that reads a complete parameter in the type it was saved in.

    Another `kind` is a tensor that the job keeps for each parameter, such as an average. If the job
    keeps none for a parameter, the function reads the parameter itself.
    """
    if kind not in ("parameter", *manifest.kept):
        has = f" (it has {', '.join(manifest.kept)})" if manifest.kept else ""
        raise TrainError(
            f"{checkpoint} has no weights named {kind!r}: only run.keep saves such weights{has}"
        )
    read, kept = open_rows(checkpoint, manifest), manifest.kept.get(kind, {})
    if kept.keys() - manifest.shapes.keys():
        raise TrainError(f"{checkpoint}: the names in {kind} are not parameters' names")

    def read_one(name: str) -> Tensor:
        shape = manifest.shapes[name]
        try:
            rows = range(num_rows(shape))
            return read(name, kind if name in kept else "parameter", rows).view(shape)
        except (OSError, SafetensorError) as error:
            raise TrainError(f"{checkpoint}: cannot be read ({error})") from None

    return read_one


def find_best(root: Path, name: str = "") -> Path | None:
    """Find the checkpoint with the best score of this name, the earliest if scores are equal.

    Without a name, use the name of the newest score. Return None if no complete checkpoint has a
    score.
    """
    best, highest = None, -math.inf
    for checkpoint in checkpoints_in(root):  # from the newest down
        try:
            score = check_sizes(checkpoint).score
        except DamagedError:
            continue
        name = name or next(iter(score), "")
        value = score.get(name, math.nan)
        height = -value if name.endswith("loss") else value
        if math.isfinite(height) and height >= highest:
            best, highest = checkpoint, height
    return best
