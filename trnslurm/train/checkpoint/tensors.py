"""Rows of tensors to and from safetensors files, at any number of workers."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trnslurm.train.checkpoint.directory import fsync_directory, fsync_file
from trnslurm.train.checkpoint.manifest import Manifest, file_name
from trnslurm.train.checkpoint.state import Shard, own_rows

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one tensor in host memory."""

    key: str
    tensor: Tensor


class HostMemory:
    """A copy of a worker's part of the state, so that training can go on while it is written.

    The memory is kept from save to save: taking new pages from the kernel costs about as much as
    copying into them, and on CUDA only pinned memory is filled at full speed.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, shards: list[Shard]) -> list[Rows]:
        """Copy the shards and wait for it; it overwrites the copy before."""
        rows = [Rows(key=_key(s.name, s.kind), tensor=self._copy(s)) for s in shards]
        if any(shard.tensor.is_cuda for shard in shards):
            torch.cuda.synchronize()
        return rows

    def _copy(self, shard: Shard) -> Tensor:
        tensor = shard.tensor
        if tensor.device.type == "xla":
            # Cut here and not on the device, where it would be a graph.
            host = tensor.cpu()
            rows = host[shard.start : shard.start + len(shard.rows)]
            # Of a few rows of many only those are kept.
            return rows if len(rows) > len(host) // 2 else rows.clone()
        key = _key(shard.name, shard.kind)
        if key not in self._kept:
            self._kept[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        return self._kept[key].copy_(tensor, non_blocking=True)


def write_rows(path: Path, rows: list[Rows]) -> tuple[int, str]:
    """Write a safetensors file durably; return its size and sha256.

    Written here and not by the library, which would neither hash on the way nor fsync, and would
    not raise an OSError when the disk is full.
    """
    header: dict[str, Any] = {}
    end = 0
    for part in rows:
        start, end = end, end + part.tensor.nbytes
        header[part.key] = {
            "dtype": _DTYPES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    chunks: list[Any] = [len(encoded).to_bytes(8, "little"), encoded]
    chunks += [part.tensor.reshape(-1).view(torch.uint8).numpy().data for part in rows]
    # Hashing takes as long as writing, and neither holds Python's lock.
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        sha256 = beside.submit(_sha256, chunks)
        for chunk in chunks:
            file.write(chunk)
        fsync_file(file)
        size = file.tell()
    fsync_directory(path.parent)
    return size, sha256.result()


def _sha256(chunks: list[Any]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


class Reader:
    """The tensors of a checkpoint, joined; a state.Read."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._files: dict[int, Any] = {}

    def __call__(self, name: str, kind: str, rows: range) -> Tensor:
        """Read rows of a tensor from the files that have them.

        The optimizer's state is 0 where a minimal checkpoint lacks it, as at the start.
        """
        if kind != "parameter" and kind not in self._manifest.kinds:
            return torch.zeros(len(rows), *self._manifest.shapes[name][1:])
        shape, workers = self._manifest.shapes[name], self._manifest.workers
        each = len(own_rows(shape, 0, workers))
        pieces = []
        for worker in range(rows.start // each, -(-rows.stop // each) if rows else 0):
            first = own_rows(shape, worker, workers).start
            piece = self._file(worker).get_slice(_key(name, kind))
            pieces.append(piece[max(0, rows.start - first) : min(each, rows.stop - first)])
        # Joined even if it is one: what the library gives is a part of the mapped file.
        return torch.cat(pieces) if pieces else torch.empty(0, *shape[1:])

    def _file(self, worker: int) -> Any:
        if worker not in self._files:
            path = self._checkpoint / file_name(worker, self._manifest.workers)
            self._files[worker] = safe_open(path, framework="pt")
        return self._files[worker]


def _key(name: str, kind: str) -> str:
    return f"{kind}/{name}"
