"""A stream of tokens that acts as one array, made of token files or of a column of rows.

The file formats are datatrove's and Megatron's:
https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trnslurm.datasets.place import Place
from trnslurm.datasets.rows import Rows, Shards

COLUMNS = ("input_ids", "tokens")
"""How libraries name the column of tokens."""
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's type codes. Floating-point types are omitted, because they are not tokens.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MOST_INDEX = 16 << 30
_LOOK, _LOOKS = 1 << 16, 16


class TokenFile(NamedTuple):
    """A file that contains only tokens."""

    name: str
    dtype: str
    tokens: int


class Tokens:
    """A sequence of tokens. Slices of it are arrays."""

    kind = ""
    documents: int | None = None
    largest: int | None = None

    def __init__(self, place: Place) -> None:
        self.place = place
        self._shards = Shards([])

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, wanted: slice) -> NDArray[Any]:
        start, stop, _ = wanted.indices(len(self))
        parts = []
        while start < stop:
            shard, first = self._shards.at(start)
            parts.append(self._part(shard, first, stop - start))
            start += len(parts[-1])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _part(self, shard: int, first: int, most: int) -> NDArray[Any]:
        """Return at least one and at most `most` tokens of one shard."""
        raise NotImplementedError

    def largest_seen(self) -> int:
        """Return the largest token in samples spread over the stream, a million tokens at most."""
        if self.largest is None:
            step = max(_LOOK, len(self) // _LOOKS)
            looks = (self[start : start + _LOOK] for start in range(0, len(self), step))
            self.largest = max((int(each.max()) for each in looks if len(each)), default=0)
        return self.largest

    def fingerprint(self) -> str:
        """Return a hash that identifies the tokens, from their counts and from both ends."""
        told = hashlib.sha256(f"{self.kind} {len(self)}".encode())
        told.update(self._shards.ends.tobytes())
        for part in (slice(0, 4096), slice(max(0, len(self) - 4096), len(self))):
            told.update(self[part].astype(np.int64).tobytes())
        return told.hexdigest()


class TokenFiles(Tokens):
    """The tokens of several files, one file after another."""

    def __init__(self, place: Place, kind: str, files: list[TokenFile], documents: int) -> None:
        super().__init__(place)
        self.kind, self.documents = kind, documents
        self._files = [file for file in files if file.tokens]
        self._shards = Shards([file.tokens for file in self._files])

    def _part(self, shard: int, first: int, most: int) -> NDArray[Any]:
        file = self._files[shard]
        dtype = np.dtype(file.dtype)
        count = min(most, file.tokens - first)
        data = self.place.read(file.name, first * dtype.itemsize, count * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise self.place.error(file.name, f"damaged: ends before token {first + count:,}")
        return np.frombuffer(data, dtype)


class TokenRows(Tokens):
    """The tokens in a column, one row after another."""

    def __init__(self, rows: Rows, column: str | None) -> None:
        super().__init__(rows.place)
        self.kind, self.documents, self._rows = rows.kind, None, rows
        names = rows.columns()
        found = [name for name in ([column] if column else COLUMNS) if name in names]
        if not found:
            asked = column or " or ".join(COLUMNS)
            has = ", ".join(names)
            raise rows.place.error(
                "", f"has no column {asked}: name the column of token ids (the columns are {has})"
            )
        self._column = found[0]
        if (length := rows.length(self._column)) is not None:
            lengths: Any = np.full(len(rows), length)
        else:
            lengths = np.frombuffer(rows.place.cache.map(self._key(), self._lengths), np.int64)
        self._shards = Shards(lengths)

    def _key(self) -> str:
        place, told = self.place, [self.kind, self._column, len(self._rows)]
        told += [(name, *place.file(name)) for name in self._rows.files]
        return hashlib.sha256(repr((place.path, told)).encode()).hexdigest()[:32]

    def _lengths(self) -> bytes:
        return b"".join(
            each.astype(np.int64).tobytes() for each in self._rows.lengths(self._column)
        )

    def _part(self, shard: int, first: int, most: int) -> NDArray[Any]:
        tokens = self._rows.tokens(shard, self._column)
        size = int(self._shards.ends[shard]) - (int(self._shards.ends[shard - 1]) if shard else 0)
        if len(tokens) != size:
            raise self.place.error("", f"sample {shard} has changed: it has {len(tokens)} tokens, "
                                   f"not {size}")  # fmt: skip
        return tokens[first : first + most]


class Blocks:
    """A stream in blocks of `seq_len` tokens. The stream's first tokens fill up the last block."""

    def __init__(self, tokens: Any, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.seq_len)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.read([number])[0]
        return found

    def read(self, numbers: Any) -> NDArray[np.int64]:
        """Return some blocks, one per row."""
        found = np.empty((len(numbers), self.seq_len), np.int64)
        for row, number in zip(found, numbers):
            if not 0 <= number < len(self):
                raise IndexError(f"there is no block {number}: the number of blocks is {len(self)}")
            block = self.tokens[number * self.seq_len : (number + 1) * self.seq_len]
            row[: len(block)] = block
            if len(block) < self.seq_len:
                row[len(block) :] = self.tokens[: self.seq_len - len(block)]
        return found


def read_datatrove(place: Place, names: list[str]) -> Tokens:
    """Open datatrove's token files: *.ds, with the ends of the documents in *.ds.index."""
    files, documents = [], 0
    for name in names:
        if place.find(f"{name}.loss") is not None:
            raise place.error(
                f"{name}.loss", "masks the loss of some tokens, which is not supported: remove it"
            )
        index = place.text(f"{name}.index", _MOST_INDEX)
        ends = np.frombuffer(index[: len(index) // 8 * 8], "<u8")
        tokens, size = int(ends[-1]) if len(ends) else 0, place.file(name).size
        if size not in (2 * tokens, 4 * tokens) or len(index) % 8:
            raise place.error(
                name, f"damaged: is {size:,} bytes, but its index lists {tokens:,} tokens"
            )
        if (np.diff(ends.astype(np.int64), prepend=0) < 0).any():
            raise place.error(
                f"{name}.index", "damaged: the ends of its documents are not in ascending order"
            )
        files.append(TokenFile(name, f"<u{size // tokens}" if tokens else "<u2", tokens))
        documents += len(ends)
    return TokenFiles(place, "datatrove", files, documents)


def read_megatron(place: Place, names: list[str]) -> Tokens:
    """Open Megatron's indexed files, NAME.bin and NAME.idx."""
    found = [_megatron_file(place, name) for name in names]
    return TokenFiles(place, "Megatron", [file for file, _ in found], sum(n for _, n in found))


def _megatron_file(place: Place, name: str) -> tuple[TokenFile, int]:
    index, data = f"{name}.idx", f"{name}.bin"
    size = place.file(index).size
    header = bytes(place.read(index, 0, _HEADER.size))
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise place.error(index, "is not a Megatron index")
    _, version, code, sequences, ends = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise place.error(index, f"has version {version} and type {code}, which are not supported")
    # Lengths, positions, ends of documents. With several modes, one more byte per sequence.
    if size != _HEADER.size + 12 * sequences + 8 * ends or not ends or size > _MOST_INDEX:
        why = (
            "has several modes, which are not supported"
            if size == _HEADER.size + 13 * sequences + 8 * ends
            else f"damaged: is {size:,} bytes, which does not match its header"
        )
        raise place.error(index, why)
    total, width = 0, np.dtype(_TYPES[code]).itemsize
    step = 1 << 20
    for first in range(0, sequences, step):
        count = min(step, sequences - first)
        lengths = np.frombuffer(place.read(index, _HEADER.size + 4 * first, 4 * count), "<i4")
        starts = np.frombuffer(
            place.read(index, _HEADER.size + 4 * sequences + 8 * first, 8 * count), "<i8"
        )
        after = total + np.cumsum(lengths, dtype=np.int64)
        if (lengths < 0).any() or (starts != (after - lengths) * width).any():
            raise place.error(index, "damaged: its sequences are not contiguous")
        total = int(after[-1])
    if place.file(data).size != total * width:
        raise place.error(data, f"damaged: is {place.file(data).size:,} bytes, but its index says "
                          f"{total * width:,}")  # fmt: skip
    return TokenFile(data, _TYPES[code], total), ends - 1
