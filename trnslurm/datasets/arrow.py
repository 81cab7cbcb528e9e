"""Arrow files, as datasets saves them, and Parquet files; the only module here that uses pyarrow.

Of an Arrow file, this module parses only the parts that locate the batches, so a batch is read only
when a sample needs it: https://arrow.apache.org/docs/format/Columnar.html, "Encapsulated message
format".
"""

from __future__ import annotations

import io
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trnslurm.datasets.errors import DataError
from trnslurm.datasets.place import Place
from trnslurm.datasets.rows import Rows, Shards

_OPEN = 4096
_OPEN_GROUPS = 32
_MAGIC = b"ARROW1\x00\x00"
_SCHEMA, _BATCH = 1, 3
_MOST_HEAD = 64 << 20
_AT_ONCE = 8192
_PIECE = 16 << 20


def pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or raise an error that says how to install it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            "pyarrow is not installed, but Arrow, Parquet and compressed shards need it: "
            "run pip install '.[data]' in a clone of trnslurm"
        ) from None


class _Batch(NamedTuple):
    file: str
    start: int
    bytes: int
    rows: int


class _Tables(Rows):
    """Rows stored in Arrow batches. The most recently used batches stay open."""

    most_open = _OPEN

    def __init__(self, place: Place, files: list[str]) -> None:
        super().__init__(place, files)
        self._open: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _load(self, shard: int) -> Any:
        """Return the column names and the columns of a shard's rows."""
        raise NotImplementedError

    def _where(self, shard: int) -> str:
        raise NotImplementedError

    def _table(self, shard: int) -> Any:
        found = self._open.get(shard)
        if found is None:
            found = _checked(self.place, self._where(shard), lambda: self._load(shard))
            self._open[shard] = found
            if len(self._open) > self.most_open:
                self._open.popitem(last=False)
        return found

    def row(self, number: int) -> dict[str, Any]:
        shard, inside = self.shards.at(number)
        names, columns = self._table(shard)
        return {name: _value(column[inside]) for name, column in zip(names, columns)}

    def columns(self) -> list[str]:
        return list(self._table(0)[0]) if len(self) else []

    def tokens(self, number: int, column: str) -> NDArray[Any]:
        shard, inside = self.shards.at(number)
        return self.as_tokens(_value(self._column(shard, column)[inside]), number, column)

    def _column(self, shard: int, column: str) -> Any:
        names, columns = self._table(shard)
        if column not in names:
            raise self.place.error(
                self._where(shard), f"has no column {column}, unlike the other files"
            )
        return columns[names.index(column)]

    def lengths(self, column: str) -> Iterator[NDArray[np.int64]]:
        compute = pyarrow("pyarrow.compute")
        for shard in range(len(self.shards.ends)):
            try:
                found = compute.list_value_length(self._column(shard, column))
                yield found.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            except pyarrow().ArrowException:
                raise self.place.error(
                    self._where(shard), f"column {column} does not contain lists of token ids"
                ) from None


class Arrow(_Tables):
    """Files in Arrow's streaming format or file format."""

    kind = "Arrow"

    def __init__(self, place: Place, names: list[str]) -> None:
        super().__init__(place, names)
        self._schemas: dict[str, Any] = {}
        self._heads: dict[str, bytes] = {}
        self._batches = [batch for name in names for batch in self._scan(name)]
        self.shards = Shards([each.rows for each in self._batches])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_schemas": {}}

    def _where(self, shard: int) -> str:
        return self._batches[shard].file

    def _load(self, shard: int) -> Any:
        told, ipc = self._batches[shard], pyarrow("pyarrow.ipc")
        if told.file not in self._schemas:
            self._schemas[told.file] = ipc.read_schema(pyarrow().py_buffer(self._heads[told.file]))
        data = self.place.read(told.file, told.start, told.bytes)
        message = ipc.read_message(pyarrow().py_buffer(data))
        batch = ipc.read_record_batch(message, self._schemas[told.file])
        batch.validate(full=True)  # a batch from elsewhere may have offsets beyond its buffers
        return batch.schema.names, batch.columns

    def _scan(self, name: str) -> list[_Batch]:
        """Find the batches of a file without reading most of it."""
        size, found = self.place.file(name).size, []
        start = 8 if bytes(self.place.read(name, 0, 8)) == _MAGIC else 0
        try:
            while start + 8 <= size:
                mark, head = struct.unpack("<Ii", self.place.read(name, start, 8))
                if mark != 0xFFFFFFFF or not 0 <= head <= min(_MOST_HEAD, size - start - 8):
                    raise ValueError("a message has no header")
                if head == 0:
                    break
                kind, body, rows, compressed = _message(
                    bytes(self.place.read(name, start + 8, head))
                )
                end = start + 8 + head + body
                if body < 0 or rows < 0 or end > size or (rows > 8 * body and body):
                    raise ValueError("a batch extends past the end of the file")
                if kind == _SCHEMA:
                    self._heads[name] = bytes(self.place.read(name, start, 8 + head))
                elif kind != _BATCH or compressed:
                    raise self.place.error(
                        name, "compressed batches and dictionaries are not supported"
                    )
                else:
                    found.append(_Batch(name, start, 8 + head + body, rows))
                start = end
        except (struct.error, ValueError) as error:
            raise self.place.error(name, f"damaged ({error})") from None
        if name not in self._heads:
            raise self.place.error(name, "is not an Arrow file")
        return found


class Parquet(_Tables):
    """Parquet files. Each row group is decoded once per node and then read at random."""

    kind = "Parquet"
    most_open = _OPEN_GROUPS

    def __init__(self, place: Place, names: list[str], column: str | None) -> None:
        super().__init__(place, names)
        self._only = [column] if column else None
        self._groups: list[tuple[str, int]] = []
        counts = []
        for name in names:
            meta = _checked(place, name, lambda name=name: self._file(name).metadata)  # type: ignore[misc]
            for group in range(meta.num_row_groups):
                self._groups.append((name, group))
                counts.append(meta.row_group(group).num_rows)
        self.shards = Shards(counts)

    def _where(self, shard: int) -> str:
        return self._groups[shard][0]

    def _file(self, name: str) -> Any:
        stream = pyarrow().PythonFile(Stream(self.place, name), mode="r")
        return pyarrow("pyarrow.parquet").ParquetFile(stream, page_checksum_verification=True)

    def _load(self, shard: int) -> Any:
        name, group = self._groups[shard]
        key = self.place.key(name, group, self._only)
        data = self.place.cache.map(key, lambda: self._decode(name, group))
        table = pyarrow("pyarrow.ipc").open_stream(pyarrow().py_buffer(data)).read_all()
        if table.num_rows != self.shards.ends[shard] - (
            self.shards.ends[shard - 1] if shard else 0
        ):
            raise self.place.error(name, f"damaged: row group {group} has {table.num_rows:,} rows")
        return table.column_names, table.columns

    def _decode(self, name: str, group: int) -> Any:
        """Return a row group as an Arrow stream; raise a DataError if it exceeds the cache."""
        sink, held = pyarrow().BufferOutputStream(), 0
        file = self._file(name)
        stated = file.metadata.row_group(group).total_byte_size
        writer = None
        if stated > self.place.cache.limit:
            raise self._large(name, group)
        for batch in file.iter_batches(_AT_ONCE, row_groups=[group], columns=self._only):
            batch.validate(full=True)
            held += batch.nbytes
            if held > self.place.cache.limit:
                raise self._large(name, group)
            writer = writer or pyarrow("pyarrow.ipc").new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            raise self.place.error(name, f"damaged: row group {group} has no rows")
        writer.close()
        return sink.getvalue()

    def _large(self, name: str, group: int) -> DataError:
        return self.place.error(
            name,
            f"row group {group} is larger, when decoded, than the cache's limit of "
            f"{self.place.cache.limit:,} bytes",
        )


class Stream(io.RawIOBase):
    """A file of a place, wrapped as a raw Python stream."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name, self._at = place, name, 0
        self._size = place.file(name).size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._at))
        data = self._place.read(self._name, self._at, wanted) if wanted else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _checked(place: Place, name: str, read: Callable[[], Any]) -> Any:
    """Run a read, and turn pyarrow's errors into a one-line DataError."""
    try:
        return read()
    except DataError:
        raise
    except (pyarrow().ArrowException, OSError, ValueError, MemoryError) as error:
        words = " ".join(str(error).split())[:200]
        raise place.error(name, f"damaged or not supported ({words})") from None


def _value(scalar: Any) -> Any:
    """Return a scalar as a Python value, or a list of numbers as an array."""
    values = getattr(scalar, "values", None) if scalar.is_valid else None
    if values is None or not hasattr(values, "null_count"):
        return scalar.as_py()
    kinds = pyarrow().types
    if values.null_count or not (kinds.is_integer(values.type) or kinds.is_floating(values.type)):
        return scalar.as_py()
    # A copy, because PyTorch warns of arrays that cannot be written to.
    return values.to_numpy(zero_copy_only=False).copy()


def _message(head: bytes) -> tuple[int, int, int, bool]:
    """Return an Arrow message's kind, body size and row count, and whether it is compressed.

    The message is a flatbuffer (https://flatbuffers.dev/internals) with the fields of Arrow's
    Message.fbs.
    """
    table = struct.unpack_from("<I", head)[0]
    kind = struct.unpack_from("<B", head, _field(head, table, 1) or len(head))[0]
    place = _field(head, table, 3)
    body = struct.unpack_from("<q", head, place)[0] if place else 0
    if kind != _BATCH:
        return kind, body, 0, False
    place = _field(head, table, 2) or len(head)
    batch = place + struct.unpack_from("<I", head, place)[0]
    rows = _field(head, batch, 0)
    count = struct.unpack_from("<q", head, rows)[0] if rows else 0
    return kind, body, count, bool(_field(head, batch, 3))


def _field(head: bytes, table: int, number: int) -> int:
    """Return the offset of a field in a flatbuffer table, or 0 if the field is absent."""
    vtable = table - struct.unpack_from("<i", head, table)[0]
    if vtable < 0 or 6 + 2 * number > struct.unpack_from("<H", head, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", head, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def decompressed(data: bytes, codec: str, size: int) -> bytes | bytearray:
    """Return the decompressed data; raise a ValueError if it is longer than `size` bytes."""
    arrow = pyarrow()
    try:
        if (
            codec == "snappy"
        ):  # the data starts with its size, and pyarrow reads only the raw format
            return bytes(arrow.Codec(codec).decompress(data, decompressed_size=size))
        found = bytearray()
        with arrow.CompressedInputStream(arrow.BufferReader(data), codec) as stream:
            while len(found) <= size and (some := stream.read(min(size + 1, _PIECE))):
                found += some
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot be decompressed ({str(error).splitlines()[0]})") from None
    if len(found) > size:
        raise ValueError(f"is larger than {size:,} bytes when it is decompressed")
    return found
