"""The index of the shards: the samples of each, and the masked tokens of each sample.

With the index, every worker computes the denominator of any step's loss without communication. The
index is next to the shards, or in the run directory if the shards' directory is read-only. It is
rebuilt when the size or the modification time of a shard has changed.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trnslurm.saves.directory import fsync_directory, fsync_file
from trnslurm.train.data.shards.files import check_shard, find_shards, masked, read_rows
from trnslurm.train.errors import TrainError
from trnslurm.train.plan import read_section

FORMAT = 1
SAY_EVERY_S = 10


@dataclass(frozen=True)
class ShardSplit:
    """One split of the shards in a directory."""

    directory: Path
    name: str
    """train or eval."""
    fallback: Path
    """The index's place in the run directory, if the shards' directory is not writable."""

    def index_files(self) -> tuple[Path, Path]:
        """Return where the index can be."""
        name = f"{self.name}-index.safetensors"
        return self.directory / name, self.fallback / name


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A shard, and what identifies the file."""

    file: str
    bytes: int
    changed_ns: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The shards of a split."""

    seq_len: int
    max_pred: int
    shards: list[ShardFile]
    """In the order of their names."""
    masked: NDArray[np.uint16]
    """The number of masked tokens in every sample, shard after shard."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of the shards' contents that does not depend on where they are."""
        known = [(shard.file, shard.bytes, shard.samples) for shard in self.shards]
        digest = hashlib.sha256(repr((self.seq_len, self.max_pred, known)).encode())
        digest.update(self.masked.tobytes())
        return digest.hexdigest()


def index_shards(split: ShardSplit, say: Callable[[str], None] = print) -> None:
    """Create the index of a split if it has none; one worker does it for all workers."""
    if _find(split):
        return
    index = _scan(split, say)
    with_shards, fallback = split.index_files()
    try:
        _write(index, with_shards)
    except OSError:
        fallback.parent.mkdir(parents=True, exist_ok=True)
        _write(index, fallback)


def read_shard_index(split: ShardSplit) -> ShardIndex:
    """Read the index that index_shards created."""
    index = _find(split)
    if index is None:
        raise TrainError(f"data: the shards in {split.directory} have just changed: start again")
    return index


def _scan(split: ShardSplit, say: Callable[[str], None]) -> ShardIndex:
    directory = split.directory
    paths = find_shards(directory, split.name)
    _, seq_len, max_pred = check_shard(paths[0])
    shards, counts = [], []
    said = time.monotonic()
    for path in paths:
        samples, tokens, masked_at_most = check_shard(path)
        if (tokens, masked_at_most) != (seq_len, max_pred):
            raise TrainError(
                f"{path}: samples of {tokens} tokens, at most {masked_at_most} of them masked, "
                f"but {paths[0].name} has {seq_len} and {max_pred}"
            )
        rows = read_rows(path, slice(None), ["masked_lm_positions"])
        counts.append(masked(rows["masked_lm_positions"]).sum(axis=1, dtype=np.uint16))
        if samples and not counts[-1].any():
            raise TrainError(f"{path}: none of its tokens are masked: fetch or create it again")
        shards.append(_describe(path, samples))
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            say(f"reading {directory} for the first time: {len(shards)} of {len(paths)} shards")
    index = ShardIndex(
        seq_len=seq_len, max_pred=max_pred, shards=shards, masked=np.concatenate(counts)
    )
    if not len(index.masked):
        raise TrainError(f"data: the shards of split {split.name} in {directory} have no samples")
    return index


def _describe(path: Path, samples: int) -> ShardFile:
    status = path.stat()
    return ShardFile(
        file=path.name, bytes=status.st_size, changed_ns=status.st_mtime_ns, samples=samples
    )


def _find(split: ShardSplit) -> ShardIndex | None:
    """Return the first index that describes the files in the directory."""
    paths = find_shards(split.directory, split.name)
    for file in split.index_files():
        index = _read(file)
        if index and [shard.file for shard in index.shards] == [path.name for path in paths]:
            now = [
                _describe(path, shard.samples)
                for path, shard in zip(paths, index.shards, strict=True)
            ]
            if now == index.shards:
                return index
    return None


def _read(path: Path) -> ShardIndex | None:
    """Read an index, or return None if it is missing, damaged or in another format."""
    try:
        with safe_open(path, framework="np") as file:
            values = json.loads(file.metadata()["index"])
            counts = file.get_tensor("masked")
        if values.get("format") != FORMAT:
            return None
        shards = [read_section(ShardFile, shard, where=str(path)) for shard in values["shards"]]
        seq_len, max_pred = values["seq_len"], values["max_pred"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, TrainError):
        return None
    if len(counts) != sum(shard.samples for shard in shards):
        return None
    return ShardIndex(seq_len=seq_len, max_pred=max_pred, shards=shards, masked=counts)


def _write(index: ShardIndex, path: Path) -> None:
    """Write the index atomically, even if more than one run does so at once."""
    header = {
        "format": FORMAT,
        "seq_len": index.seq_len,
        "max_pred": index.max_pred,
        "shards": [asdict(shard) for shard in index.shards],
    }
    partial = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(save({"masked": index.masked}, {"index": json.dumps(header)}))
            fsync_file(file)
        partial.rename(path)
        fsync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
