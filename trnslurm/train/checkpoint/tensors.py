"""Rows of tensors to and from safetensors files, at any number of workers."""

import errno
import fcntl
import functools
import hashlib
import io
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trnslurm.train.checkpoint.directory import fsync_directory, fsync_file
from trnslurm.train.checkpoint.manifest import CheckpointManifest, file_name
from trnslurm.train.checkpoint.state import OwnState, Read, ReadOwn, TensorShard, own_rows

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    # Of buffers.
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# Where a file's header has the OwnState.
_OWN = "own_state"

# What direct I/O requires of memory, offsets and sizes, also on disks with the largest sectors.
PAGE = 4096
# Written in one system call: enough to keep a disk, or several servers, busy.
BLOCK = 64 << 20
# Direct I/O is not supported at all, or not from or to this place.
NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


class HostCopy:
    """A copy of a worker's part of the state, so that training continues while it is written.

    The memory is kept from save to save: new pages from the kernel cost about as much as copying
    into them, and on CUDA only pinned memory is filled at full speed. The layout is that of the
    file, so that it is written in large blocks and past the page cache, which would fill as many
    pages again.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pages = memoryview(b"")
        """The copy, in whole pages; beyond the end of the file they mean nothing."""
        self._num_bytes = 0
        """The size of the file."""

    def copy(self, shards: list[TensorShard], own: OwnState | None = None) -> None:
        """Copy the shards and wait for it; it overwrites the copy before."""
        # Wide types first, so that each tensor is aligned.
        shards = sorted(shards, key=lambda shard: -shard.tensor.element_size())
        header: dict[str, Any] = {}
        end = 0
        for shard in shards:
            shape = _saved_shape(shard)
            start, end = end, end + math.prod(shape) * shard.tensor.element_size()
            header[_key(shard.name, shard.kind)] = {
                "dtype": DTYPES[shard.tensor.dtype],
                "shape": shape,
                "data_offsets": [start, end],
            }
        # The format's place for texts.
        about = {"__metadata__": {_OWN: json.dumps(vars(own))}} if own else {}
        encoded = json.dumps(about | header).encode()
        encoded += b" " * (-len(encoded) % 8)
        encoded = len(encoded).to_bytes(8, "little") + encoded
        self._num_bytes = len(encoded) + end
        size = -(-self._num_bytes // PAGE) * PAGE
        on_cuda = any(shard.tensor.is_cuda for shard in shards)
        self._reserve(size, pinned=on_cuda)
        self._pages = self._memory.numpy().data[:size]
        self._pages[: len(encoded)] = encoded
        data = self._memory[len(encoded) : self._num_bytes]
        for shard, entry in zip(shards, header.values(), strict=True):
            start, end = entry["data_offsets"]
            tensor = shard.tensor
            if tensor.device.type == "xla":
                # Cut here and not on the device, where it would be a graph.
                tensor = tensor.cpu().reshape(tensor.shape or (1,))
                tensor = tensor[shard.start : shard.start + len(shard.rows)]
            target = data[start:end].view(tensor.dtype).view(entry["shape"])
            target.copy_(tensor, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize()

    def write(self, path: Path) -> tuple[int, str]:
        """Write the copy durably as a safetensors file; return its size and sha256.

        Written here and not by the library, which would neither hash while it writes nor fsync, and
        would not raise an OSError when the disk is full.
        """
        content = self._pages[: self._num_bytes]
        # Neither hashing nor writing holds Python's lock, and a thread that writes directly waits.
        with ThreadPoolExecutor(1) as hashing:
            sha256 = hashing.submit(lambda: hashlib.sha256(content).hexdigest())
            with open(_open_direct(path), "wb", buffering=0) as file:
                left = self._pages
                while left:
                    left = left[_write(file, left[:BLOCK]) :]
                file.truncate(self._num_bytes)
                fsync_file(file)
            fsync_directory(path.parent)
            return self._num_bytes, sha256.result()

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
        # Also the rest of a write that was cut short, because it begins within a page.
        if error.errno not in NOT_DIRECT:
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, 0)  # of all that F_SETFL can change, only O_DIRECT is set
    return file.write(block)


def open_rows(checkpoint: Path, manifest: CheckpointManifest) -> Read:
    """Return what reads the tensors of a checkpoint, from the files that have the rows.

    The optimizer's state is 0 where a minimal checkpoint lacks it, as at the start.
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
    """Return what reads the state of a job's own optimizers."""
    file = _open_files(checkpoint, manifest)

    @functools.cache
    def beside(worker: int) -> OwnState:
        return OwnState(**json.loads(file(worker).metadata()[_OWN]))

    @functools.cache
    def kinds(worker: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in file(worker).keys():  # noqa: SIM118 - it is no dict
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
    """Return what opens a worker's file, once."""

    @functools.cache
    def file(worker: int) -> Any:
        return safe_open(checkpoint / file_name(worker, manifest.workers), framework="pt")

    return file


def _key(name: str, kind: str) -> str:
    return f"{kind}/{name}"
