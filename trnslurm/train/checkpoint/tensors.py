"""Rows of tensors to and from safetensors files, at any number of workers."""

import errno
import fcntl
import hashlib
import io
import json
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trnslurm.train.checkpoint.directory import fsync_directory, fsync_file
from trnslurm.train.checkpoint.manifest import CheckpointManifest, file_name
from trnslurm.train.checkpoint.state import TensorShard, own_rows

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


# What direct I/O wants of memory, offsets and sizes, on disks with the largest sectors too.
PAGE = 4096
# In one system call: large enough for a disk, or several servers, to be busy with.
BLOCK = 64 << 20
# Direct I/O is not supported at all, or not from or to this place.
NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A worker's rows in host memory: a safetensors file, as it will be on the disk."""

    pages: memoryview
    """Whole pages; behind the file's end they mean nothing."""
    num_bytes: int

    @property
    def content(self) -> memoryview:
        """The bytes of the file."""
        return self.pages[: self.num_bytes]


class HostMemory:
    """A copy of a worker's part of the state, so that training can go on while it is written.

    The memory is kept from save to save: taking new pages from the kernel costs about as much as
    copying into them, and on CUDA only pinned memory is filled at full speed. It is laid out as the
    file, so that it is written in large blocks and past the page cache, which would take and fill
    as many pages again.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, shards: list[TensorShard]) -> Rows:
        """Copy the shards and wait for it; it overwrites the copy before."""
        # Wide types first, so that each tensor begins where one of its type may.
        shards = sorted(shards, key=lambda shard: -shard.tensor.element_size())
        header: dict[str, Any] = {}
        end = 0
        for shard in shards:
            shape = _saved_shape(shard)
            start, end = end, end + math.prod(shape) * shard.tensor.element_size()
            header[_key(shard.name, shard.kind)] = {
                "dtype": _DTYPES[shard.tensor.dtype],
                "shape": shape,
                "data_offsets": [start, end],
            }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        encoded = len(encoded).to_bytes(8, "little") + encoded
        num_bytes = len(encoded) + end
        on_cuda = any(shard.tensor.is_cuda for shard in shards)
        self._reserve(-(-num_bytes // PAGE) * PAGE, pinned=on_cuda)
        pages = self._memory.numpy().data
        pages[: len(encoded)] = encoded
        data = self._memory[len(encoded) : num_bytes]
        for shard, entry in zip(shards, header.values(), strict=True):
            start, end = entry["data_offsets"]
            tensor = shard.tensor
            if tensor.device.type == "xla":
                # Cut here and not on the device, where it would be a graph.
                tensor = tensor.cpu()[shard.start : shard.start + len(shard.rows)]
            target = data[start:end].view(tensor.dtype).view(entry["shape"])
            target.copy_(tensor, non_blocking=True)
        if on_cuda:
            torch.cuda.synchronize()
        return Rows(pages=pages[: -(-num_bytes // PAGE) * PAGE], num_bytes=num_bytes)

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if len(self._memory) >= size:
            return
        if pinned:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages: copying is slower
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)


def _saved_shape(shard: TensorShard) -> list[int]:
    shape = list(shard.tensor.shape)
    return [len(shard.rows), *shape[1:]] if shard.tensor.device.type == "xla" else shape


def write_rows(path: Path, rows: Rows) -> tuple[int, str]:
    """Write a safetensors file durably; return its size and sha256.

    Written here and not by the library, which would neither hash on the way nor fsync, and would
    not raise an OSError when the disk is full.
    """
    # Neither hashing nor writing holds Python's lock, and a thread that writes directly only waits.
    with ThreadPoolExecutor(1) as beside:
        sha256 = beside.submit(lambda: hashlib.sha256(rows.content).hexdigest())
        with open(_open_direct(path), "wb", buffering=0) as file:
            left = rows.pages
            while left:
                left = left[_write(file, left[:BLOCK]) :]
            file.truncate(rows.num_bytes)
            fsync_file(file)
        fsync_directory(path.parent)
        return rows.num_bytes, sha256.result()


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
    return os.open(path, flags, 0o666)


def _write(file: io.FileIO, block: memoryview) -> int:
    try:
        return file.write(block)
    except OSError as error:
        # Also after a write that was cut short, whose rest begins within a page.
        if error.errno not in NOT_DIRECT:
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, 0)  # of all that F_SETFL can change, only O_DIRECT is set
    return file.write(block)


class Reader:
    """The tensors of a checkpoint, joined; a state.Read."""

    def __init__(self, checkpoint: Path, manifest: CheckpointManifest) -> None:
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
