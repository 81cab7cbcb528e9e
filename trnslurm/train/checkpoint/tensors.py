"""Reads and writes rows of tensors in safetensors files, for any number of workers."""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trnslurm.saves.manifest import file_name
from trnslurm.saves.memory import Piece
from trnslurm.train.checkpoint.manifest import CheckpointManifest
from trnslurm.train.checkpoint.state import OwnState, Read, ReadOwn, TensorShard, own_rows

# Where a file's header has the OwnState.
_OWN = "own_state"


def pieces_of(shards: Iterable[TensorShard]) -> list[Piece]:
    """Return what a worker's file contains of the shards."""
    return [
        Piece(
            _key(shard.name, shard.kind),
            shard.tensor,
            range(shard.start, shard.start + len(shard.rows))
            if shard.tensor.device.type == "xla"
            else None,
        )
        for shard in shards
    ]


def texts_of(own: OwnState | None) -> dict[str, str]:
    """Return the header strings for a job's own optimizers, whose tensors are shards."""
    return {_OWN: json.dumps(vars(own))} if own else {}


def open_rows(checkpoint: Path, manifest: CheckpointManifest) -> Read:
    """Return a function that reads a checkpoint's tensors, from the files that have the rows.

    If a minimal checkpoint has no optimizer state, the state is 0, as at the start.
    """
    workers, file = manifest.workers, _open_files(checkpoint, manifest)

    def read(name: str, kind: str, rows: range) -> Tensor:
        shape = manifest.kept.get(kind, manifest.shapes)[name]
        if name in manifest.owners and kind == "parameter":
            whole: Tensor = file(manifest.owners[name]).get_tensor(_key(name, kind))
            return whole.reshape(shape or (1,))[rows.start : rows.stop].clone()
        if kind not in ("parameter", *manifest.kinds, *manifest.kept):
            return torch.zeros(len(rows), *shape[1:])
        each = len(own_rows(shape, 0, workers))
        pieces = []
        for worker in range(rows.start // each, -(-rows.stop // each) if rows else 0):
            first = own_rows(shape, worker, workers).start
            piece = file(worker).get_slice(_key(name, kind))
            pieces.append(piece[max(0, rows.start - first) : min(each, rows.stop - first)])
        # Joined even if it is one: the library returns a part of the mapped file.
        return torch.cat(pieces) if pieces else torch.empty(0, *shape[1:])

    return read


def open_own(checkpoint: Path, manifest: CheckpointManifest) -> ReadOwn:
    """Return a function that reads the state of a job's own optimizers."""
    file = _open_files(checkpoint, manifest)

    @functools.cache
    def beside(worker: int) -> OwnState:
        return OwnState(**json.loads(file(worker).metadata()[_OWN]))

    @functools.cache
    def kinds(worker: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in file(worker).keys():  # noqa: SIM118 - it is not a dict
            kind, _, name = key.partition("/")
            if kind not in ("parameter", *manifest.kept):
                found.setdefault(name, []).append(kind)
        return found

    def read(names: Iterable[str]) -> OwnState:
        of = {}
        for name in names:
            owner = manifest.owners[name]
            tensors = {
                kind: file(owner).get_tensor(_key(name, kind))
                for kind in kinds(owner).get(name, ())
            }
            of[name] = beside(owner).of.get(name, {}) | tensors
        return OwnState(of, beside(0).groups)

    return read


def _open_files(checkpoint: Path, manifest: CheckpointManifest) -> Callable[[int], Any]:
    """Return a function that opens each worker's file only once."""

    @functools.cache
    def file(worker: int) -> Any:
        return safe_open(checkpoint / file_name(worker, manifest.workers), framework="pt")

    return file


def _key(name: str, kind: str) -> str:
    return f"{kind}/{name}"
