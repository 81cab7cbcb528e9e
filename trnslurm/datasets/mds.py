"""MosaicML's shards (MDS), plain or compressed. The format is described at

https://github.com/mosaicml/streaming/blob/main/streaming/base/format/mds/writer.py
https://github.com/mosaicml/streaming/blob/main/streaming/base/format/mds/encodings.py
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trnslurm.datasets.arrow import decompressed
from trnslurm.datasets.place import Here, Place, differs
from trnslurm.datasets.rows import Rows, Shards

INDEX = "index.json"
_OPEN = 1024
# The names in an index by those of pyarrow.
_CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
            "float16", "float32", "float64")  # fmt: skip
# The first byte of an array whose type the index leaves open.
_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32",
          33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip

Decode = Callable[[Any], Any]


class _Column(NamedTuple):
    name: str
    encoding: str
    size: int
    """In bytes, or 0 if the size differs from sample to sample."""


class _Shard(NamedTuple):
    file: str
    """The file as it was written: the compressed one, if there is one."""
    codec: str
    bytes: int
    """The size without compression."""
    samples: int
    hashes: dict[str, str]
    plain_hashes: dict[str, str]


class Mds(Rows):
    """The samples in the shards of an index."""

    kind = "MDS"

    def __init__(self, place: Place) -> None:
        super().__init__(place, [INDEX])
        try:
            shards = json.loads(place.text(INDEX))["shards"]
            self._shards = [self._shard(each) for each in shards]
            first: Any = shards[0] if shards else {"column_names": ()}
            listed = [
                list(zip(each["column_names"], each["column_encodings"], each["column_sizes"]))
                for each in shards
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise place.error(INDEX, f"is not an MDS index ({error!r})") from None
        if any(each != listed[0] for each in listed):
            raise place.error(INDEX, "its shards have different columns, which is not supported")
        self._names = [str(name) for name in first["column_names"]]
        self._columns = [self._column(*each) for each in (listed[0] if listed else ())]
        self.shards = Shards([each.samples for each in self._shards])
        self._offsets: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def row(self, number: int) -> dict[str, Any]:
        parts = self._parts(number)
        return {each.name: self._decoded(each, part, number) for each, part in parts}

    def columns(self) -> list[str]:
        return self._names

    def tokens(self, number: int, column: str) -> NDArray[Any]:
        each, part = next(pair for pair in self._parts(number) if pair[0].name == column)
        if each.encoding == "bytes":  # as LLM Foundry wrote them before MDS had arrays
            if len(part) % 8:
                raise self.place.error(
                    "", f"{column} of sample {number} does not contain 8-byte tokens"
                )
            return np.frombuffer(part, "<i8")
        return self.as_tokens(self._decoded(each, part, number), number, column)

    def length(self, column: str) -> int | None:
        found = next(each for each in self._columns if each.name == column)
        kind, _, rest = found.encoding.partition(":")
        shape = rest.partition(":")[2]
        return int(shape) if kind == "ndarray" and shape.isdigit() else None

    def _shard(self, told: Any) -> _Shard:
        if told["format"] != "mds" or told["version"] != 2:
            raise ValueError(f"format {told['format']}, version {told['version']}")
        plain, packed = told["raw_data"], told.get("zip_data")
        codec = str(told.get("compression") or "").partition(":")[0] if packed else ""
        if codec and codec not in _CODECS:
            raise self.place.error(
                INDEX, f"its shards are compressed with {codec}, which is not supported"
            )
        file = str((packed or plain)["basename"])
        if file.startswith("/") or ".." in PurePosixPath(file).parts:
            raise self.place.error(INDEX, f"{file!r} is outside the directory")
        size, samples = int(plain["bytes"]), int(told["samples"])
        if not samples >= 0 or 4 * (samples + 2) > size:
            raise self.place.error(
                INDEX, f"{file} cannot have {samples:,} samples in {size:,} bytes"
            )
        hashes = [dict(each.get("hashes") or {}) if each else {} for each in (packed, plain)]
        return _Shard(file, codec, size, samples, *hashes)

    def _column(self, name: str, encoding: str, size: Any) -> _Column:
        if _decoder(encoding) is None:
            why = "can run arbitrary code" if encoding == "pkl" else "is not supported"
            raise self.place.error(INDEX, f"column {name} is encoded as {encoding}, which {why}")
        return _Column(name, encoding, int(size or 0))

    def _parts(self, number: int) -> list[tuple[_Column, Any]]:
        """Return a sample's columns and their bytes."""
        shard, inside = self.shards.at(number)
        offsets = self._offsets.get(shard)
        if offsets is None:
            offsets = self._open(shard)
        start, end = int(offsets[inside]), int(offsets[inside + 1])
        data = memoryview(self._read(shard, start, end - start))
        ends = 4 * sum(not each.size for each in self._columns)
        sizes = iter(np.frombuffer(data[:ends], "<u4").tolist() if len(data) >= ends else ())
        parts = []
        for each in self._columns:
            begin, ends = ends, ends + (each.size or next(sizes, len(data)))
            parts.append((each, data[begin:ends]))
        if ends != len(data):
            raise self._damaged(shard, f"sample {number} is {len(data)} bytes, not {ends}")
        return parts

    def _decoded(self, column: _Column, part: Any, number: int) -> Any:
        try:
            decode = _decoder(column.encoding)
            assert decode
            return decode(part)
        except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
            shard, _ = self.shards.at(number)
            raise self._damaged(shard, f"{column.name} of sample {number}: {error}") from None

    def _open(self, shard: int) -> NDArray[np.int64]:
        """Return the offsets of a shard's samples; raise a DataError if the index differs."""
        told = self._shards[shard]
        plain = isinstance(self.place, Here) and not told.codec
        if plain:
            if (size := self.place.file(told.file).size) != told.bytes:
                raise self._damaged(shard, f"is {size:,} bytes, not {told.bytes:,}")
            if told.plain_hashes:
                self.place.check(told.file, told.plain_hashes)
        head = np.frombuffer(self._read(shard, 0, 4 * (told.samples + 2)), "<u4").astype(np.int64)
        offsets = head[1:]
        if (
            len(head) != told.samples + 2
            or head[0] != told.samples
            or (np.diff(offsets) < 0).any()
            or not 4 * len(head) <= offsets[0] <= offsets[-1] <= told.bytes
        ):
            raise self._damaged(shard, "its header does not match the index")
        self._offsets[shard] = offsets
        if len(self._offsets) > _OPEN:
            self._offsets.popitem(last=False)
        return offsets

    def _read(self, shard: int, start: int, length: int) -> Any:
        """Return bytes of a decompressed shard, from the mapped file or from the cache."""
        told = self._shards[shard]
        if isinstance(self.place, Here) and not told.codec:
            return self.place.read(told.file, start, length)
        key = self.place.key(told.file, "plain")
        return self.place.cache.read(key, start, length, lambda: self._plain(shard))

    def _plain(self, shard: int) -> Any:
        """Return a complete decompressed shard after comparing it with its checksums."""
        told, place = self._shards[shard], self.place
        if told.bytes > place.cache.limit:
            raise place.error(
                told.file, f"is {told.bytes:,} bytes, more than the whole cache can hold"
            )
        if place.file(told.file).size > 2 * told.bytes + (1 << 20):
            raise self._damaged(shard, "is larger than its decompressed size")
        data: Any = b"".join(place.chunks(told.file))
        wrong = differs(iter([data]), told.hashes)
        if told.codec and not wrong:
            try:
                data = decompressed(data, _CODECS[told.codec], told.bytes)
            except ValueError as error:
                wrong = str(error)
        wrong = wrong or differs(iter([data]), told.plain_hashes)
        if wrong or len(data) != told.bytes:
            raise self._damaged(shard, wrong or f"is {len(data):,} bytes, not {told.bytes:,}")
        return data

    def _damaged(self, shard: int, why: str) -> Exception:
        return self.place.error(self._shards[shard].file, f"damaged: {why}")


@functools.lru_cache
def _decoder(encoding: str) -> Decode | None:
    """Return the function that decodes a column, or None if the encoding is not supported."""
    kind, _, rest = encoding.partition(":")
    if kind in _SCALARS:
        dtype = np.dtype(kind).newbyteorder("<")
        return lambda part: np.frombuffer(part, dtype)[0]
    if kind == "ndarray":
        dtype_name, _, shape = rest.partition(":")
        if dtype_name and dtype_name not in _TYPES.values():
            return None
        fixed = tuple(int(each) for each in shape.split(",")) if shape else None
        return lambda part: _array(part, dtype_name, fixed)
    plain: dict[str, Decode] = {
        "bytes": bytes,
        "str": lambda part: str(part, "utf-8"),
        "int": lambda part: int(np.frombuffer(part, "<i8")[0]),
        "str_int": lambda part: int(str(part, "utf-8")),
        "str_float": lambda part: float(str(part, "utf-8")),
        "str_decimal": lambda part: Decimal(str(part, "utf-8")),
        "json": lambda part: json.loads(str(part, "utf-8")),
        "jpeg": _image,
        "png": _image,
    }
    return plain.get(kind)


def _array(part: Any, dtype_name: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    if not dtype_name:
        dtype_name, part = _TYPES[part[0]], part[1:]
    if shape is None:
        axes, width = part[0] >> 2, 1 << part[0] % 4
        shape = tuple(np.frombuffer(part[1 : 1 + axes * width], f"<u{width}").tolist())
        part = part[1 + axes * width :]
    # A copy, because PyTorch warns of arrays that cannot be written to.
    return np.frombuffer(part, np.dtype(dtype_name).newbyteorder("<")).reshape(shape).copy()


def _image(part: Any) -> Any:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(part))
