"""A worker's file of a checkpoint: copied to host memory at once, and written from there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trnslurm.saves.directory import fsync_directory, fsync_file

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

# The alignment of memory, offsets and sizes for direct I/O, even with the largest sectors.
PAGE = 4096
# Written in one system call: enough to keep a disk, or several servers, busy.
BLOCK = 64 << 20
# Direct I/O is not supported at all, or not from or to this place.
NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


class Piece(NamedTuple):
    """The part of a tensor that a worker saves."""

    key: str
    """The tensor's name in the file."""
    tensor: Tensor
    rows: range | None = None
    """Which rows of the tensor are saved, or None for all of them."""

    @property
    def shape(self) -> list[int]:
        """The shape that is saved."""
        shape = list(self.tensor.shape)
        return shape if self.rows is None else [len(self.rows), *shape[1:]]


def layout(
    entries: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return a safetensors file's header, and where each tensor's bytes begin and end after it.

    `entries` has the type and shape of each tensor. `about` has strings for the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    # Wide types first, so that each tensor is aligned, and then by name, as the library does.
    for key in sorted(entries, key=lambda key: (-entries[key][0].itemsize, key)):
        dtype, shape = entries[key]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]
        }  # fmt: skip
        places[key] = start, end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, places


def write_each(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    read: Callable[[str], Tensor],
    about: Mapping[str, str],
) -> None:
    """Write a safetensors file of tensors that are read one at a time."""
    header, places = layout(entries, about)
    with path.open("wb") as file:
        file.write(header)
        for key in places:
            file.write(read(key).contiguous().view(-1).view(torch.uint8).numpy().data)


class HostCopy:
    """A copy of a worker's part of the state, so that training continues while it is being written.

    The memory is reused from save to save: new pages from the kernel cost about as much as copying
    into them, and on CUDA only pinned memory is filled at full speed. The layout is that of the
    file, so that it is written in large blocks. The blocks bypass the page cache, which would need
    the same amount of memory again.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pages = memoryview(b"")
        """The copy, in full pages. Bytes beyond the end of the file have no meaning."""
        self._num_bytes = 0
        """The size of the file."""

    def copy(self, pieces: Iterable[Piece], about: Mapping[str, str] | None = None) -> None:
        """Copy the pieces and wait for the copy to finish; it overwrites the previous copy.

        `about` has strings for the file's header.
        """
        pieces = list(pieces)
        entries = {piece.key: (piece.tensor.dtype, piece.shape) for piece in pieces}
        encoded, places = layout(entries, about)
        self._num_bytes = len(encoded) + max((end for _, end in places.values()), default=0)
        size = -(-self._num_bytes // PAGE) * PAGE
        on_cuda = any(piece.tensor.is_cuda for piece in pieces)
        self._reserve(size, pinned=on_cuda)
        self._pages = self._memory.numpy().data[:size]
        self._pages[: len(encoded)] = encoded
        data = self._memory[len(encoded) : self._num_bytes]
        for piece in pieces:
            start, end = places[piece.key]
            tensor = piece.tensor
            if piece.rows:
                # Slice here and not on the device, where slicing would add a graph.
                tensor = tensor.cpu().reshape(tensor.shape or (1,))
                tensor = tensor[piece.rows.start : piece.rows.stop]
            target = data[start:end].view(tensor.dtype).view(piece.shape)
            target.copy_(tensor, non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.synchronize()

    def write(self, path: Path) -> tuple[int, str]:
        """Write the copy durably as a safetensors file; return its size and sha256.

        The safetensors library is not used, because it neither hashes while it writes nor calls
        fsync, and raises no OSError when the disk is full.
        """
        content = self._pages[: self._num_bytes]
        # Neither hashing nor writing holds the GIL, and a thread that writes directly waits.
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
        # This includes the rest of a short write, because it starts within a page.
        if error.errno not in NOT_DIRECT:
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, 0)  # of all that F_SETFL can change, only O_DIRECT is set
    return file.write(block)
