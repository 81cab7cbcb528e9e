"""Protobuf's wire format: the fields of a message, without its schema.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield each field's number, wire type and value; raise a ValueError if data is damaged."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = _varint(message, at)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(kind)
            if kind == BYTES:
                size, at = _varint(message, at)
            if size is None or at + size > len(message):
                raise ValueError("a damaged message")
            value, at = message[at : at + size], at + size
        yield number, kind, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(message[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise ValueError("a damaged message")


def signed(value: int) -> int:
    """Return a varint as an int64."""
    return value - (1 << 64) if value >= 1 << 63 else value
