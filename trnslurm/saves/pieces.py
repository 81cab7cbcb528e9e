"""Sharded tensors: which piece each worker saves, and what it reads from others' files.

A tensor is saved under its name, in one piece per shard. A file's header says where in the tensor
each piece begins, in the format of torch.distributed.checkpoint's HuggingFaceStorageWriter
(torch/distributed/checkpoint/_hf_utils.py, torch 2.9), whose reader can also read these files.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from trnslurm.contract.files import open_file
from trnslurm.saves.manifest import DamagedError
from trnslurm.saves.memory import DTYPES, Piece

_PLACES = "DCP_SHARDING_INFO"
_MOST_HEADER = 256 << 20
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Part(NamedTuple):
    """The part of a tensor that one worker has."""

    tensor: Tensor
    begin: tuple[int, ...]
    """Where the part begins in the complete tensor."""
    whole: tuple[int, ...]
    """The shape of the complete tensor."""
    mine: bool
    """Whether this worker is the one that saves the part, if others have the same part."""


def parts_of(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[str, Part]:
    """Return this worker's parts of tensors, by name.

    A tensor that is not a DTensor is assumed to be the same on all workers. One worker saves each
    such tensor, and they are divided so that all workers save about the same amount.
    """
    alike = {name: tensor for name, tensor in tensors.items() if not _is_spread(tensor)}
    load = [0] * world
    savers = {}
    for name in sorted(alike, key=lambda name: (-alike[name].nbytes, name)):
        savers[name] = load.index(min(load))
        load[savers[name]] += alike[name].nbytes
    found = {}
    for name, tensor in tensors.items():
        if name in savers:
            begin = (0,) * tensor.dim()
            found[name] = Part(tensor, begin, tuple(tensor.shape), savers[name] == rank)
        else:
            found[name] = _part_of_spread(name, tensor)
    return found


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _part_of_spread(name: str, tensor: Any) -> Part:
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise ValueError(
            f"trnslurm.save: {name} has {len(chunks)} pieces on one worker, which is not supported"
        )
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    # Of the workers with the same piece, one saves it: a different worker for each tensor.
    turn, mine = crc32(name.encode()), place is not None
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"trnslurm.save: {name} is a partial DTensor: redistribute it first")
        if mine and placement.is_replicate():
            mine = place[dimension] == turn % mesh.size(dimension)
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    empty = local.numel() == 0 < math.prod(tensor.shape)
    return Part(local, tuple(chunks[0].offsets), tuple(tensor.shape), mine and not empty)


def to_write(parts: Mapping[str, Part]) -> tuple[list[Piece], dict[str, str]]:
    """Return the pieces that this worker writes, and the strings for its file's header."""
    mine = {name: part for name, part in parts.items() if part.mine}
    places = {name: {"saved_offsets": list(part.begin)} for name, part in mine.items()}
    texts = {"format": "pt", _PLACES: json.dumps(places)}
    return [Piece(name, part.tensor.detach()) for name, part in mine.items()], texts


def fingerprint(parts: Mapping[str, Part]) -> int:
    """Return a number that is the same on all workers if they have the same tensors."""
    return crc32(json.dumps(sorted((name, part.whole) for name, part in parts.items())).encode())


class _Saved(NamedTuple):
    """A piece in a file."""

    begin: tuple[int, ...]
    tensor: Tensor
    """Mapped from the file, not read into memory."""


class Files:
    """The tensors in the files of a checkpoint."""

    def __init__(self, directory: Path, names: Iterable[str], first: str | None = None) -> None:
        """Open files as they are needed, starting with `first`, which may be all that is."""
        self._directory = directory
        self._left = sorted(names, key=lambda name: (name != first, name))
        self._found: dict[str, list[_Saved]] = {}
        self._texts: dict[str, Mapping[str, str]] = {}
        if first:
            self._open(self._left.pop(0))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        while self._left:
            self._open(self._left.pop(0))
        return sorted(self._found)

    def texts_of(self, name: str) -> Mapping[str, str]:
        """Return the strings in a file's header."""
        if name in self._left:
            self._left.remove(name)
            self._open(name)
        return self._texts[name]

    def first(self, name: str) -> Tensor:
        """Return a tensor that is complete in one of the files opened so far."""
        if name not in self._found:
            raise DamagedError(f"{name}: no file contains it")
        return self._found[name][0].tensor.clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a complete tensor."""
        self.names()
        if name not in self._found:
            raise DamagedError(f"{name}: no file contains it")
        ends = ([b + n for b, n in zip(p.begin, p.tensor.shape)] for p in self._found[name])
        return tuple(max(sizes) for sizes in zip(*ends))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        self.shape(name)
        return self._found[name][0].tensor.dtype

    def fill(self, name: str, part: Part) -> str:
        """Fill a worker's part with what was saved; return what does not fit, if anything."""
        with torch.no_grad():
            if self._copy(name, part):
                return ""
            self.names()
            if name not in self._found:
                return f"{name} is missing"
            if (shape := self.shape(name)) != part.whole:
                return f"{name} has shape {list(shape)} instead of {list(part.whole)}"
            return "" if self._copy(name, part) else f"{name} is not complete"

    def whole(self, name: str) -> Tensor:
        """Return a complete tensor, in host memory."""
        shape = self.shape(name)
        found = torch.empty(shape, dtype=self.dtype(name))
        if problem := self.fill(name, Part(found, (0,) * len(shape), shape, mine=True)):
            raise DamagedError(problem)
        return found

    def _copy(self, name: str, part: Part) -> bool:
        """Copy from the files opened so far; return whether they contain the whole part."""
        copied = 0
        for begin, tensor in self._found.get(name, ()):
            if len(begin) != len(part.begin):
                return False
            there, here = [], []
            for a, n, b, m in zip(begin, tensor.shape, part.begin, part.tensor.shape):
                low, high = max(a, b), min(a + n, b + m)
                there.append(slice(low - a, high - a))
                here.append(slice(low - b, high - b))
            if all(each.start < each.stop for each in here):
                piece = tensor[tuple(there)]
                target = part.tensor[tuple(here)] if here else part.tensor
                target.copy_(piece)
                copied += piece.numel()
        return copied == part.tensor.numel() and name in self._found

    def _open(self, name: str) -> None:
        path = self._directory / name
        try:
            with open_file(path) as file:
                header_bytes = struct.unpack("<Q", file.read(8))[0]
                if header_bytes > _MOST_HEADER:
                    raise ValueError
                header = dict(json.loads(file.read(header_bytes)))
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            texts = header.pop("__metadata__", {})
            places = json.loads(texts.get(_PLACES, "{}"))
            for key, entry in header.items():
                tensor = _mapped(data, 8 + header_bytes, entry)
                begin = places[key]["saved_offsets"] if key in places else [0] * tensor.dim()
                self._found.setdefault(key, []).append(_Saved(tuple(begin), tensor))
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RuntimeError, struct.error):
            raise DamagedError(f"{name}: its header is not a safetensors header") from None
        self._texts[name] = texts


def _mapped(data: mmap.mmap, first: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
    start, end = entry["data_offsets"]
    count = math.prod(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    if not 0 <= start <= end <= len(data) - first or count * size != end - start:
        raise ValueError
    if not count:
        return torch.empty(shape, dtype=dtype)
    if (first + start) % size:  # others' files need not be aligned
        copy = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=first + start)
        return copy.clone().view(dtype).view(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=first + start).view(shape)
