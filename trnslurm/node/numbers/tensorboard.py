"""Reads scalars from TensorBoard's event files.

A file is a series of records: the length (8 bytes), its checksum (4), an Event, its checksum (4).
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/summary.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from trnslurm.node.numbers.proto import BYTES, FIXED32, FIXED64, VARINT, fields, signed

NAME = "events.out.tfevents."
_HEAD, _FOOT = 12, 4
_MOST_RECORD = 256 << 10  # a record with more is an image, a graph or the like
_DAMAGED = 1 << 40
# Fields of Event, Summary, Summary.Value and TensorProto.
_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE, _TENSOR = 1, 2, 5, 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE = 1, 2
# Lightning's logger writes this with -1 for its table of hyperparameters.
_NO_NUMBERS = {"hp_metric"}


class Scalar(NamedTuple):
    """A step's metric."""

    step: int
    tag: str
    value: float
    time: float


def scalars(data: bytes) -> tuple[list[Scalar], int]:
    """Return the scalars in complete records, and how many bytes to advance; raise a ValueError.

    The next record may start after the data, because a long record is skipped unread.
    """
    found: list[Scalar] = []
    at = 0
    while at + _HEAD <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if length > _DAMAGED:
            raise ValueError("no event file")
        end = at + _HEAD + length + _FOOT
        if length <= _MOST_RECORD:
            if end > len(data):
                break
            found += _of_event(data[at + _HEAD : end - _FOOT])
        at = end
    return found, at


def _of_event(event: bytes) -> Iterator[Scalar]:
    step, time, summaries = 0, 0.0, []
    for number, kind, value in fields(event):
        if (number, kind) == (_STEP, VARINT) and isinstance(value, int):
            step = signed(value)
        elif isinstance(value, bytes) and (number, kind) == (_WALL_TIME, FIXED64):
            (time,) = struct.unpack("<d", value)
        elif isinstance(value, bytes) and (number, kind) == (_SUMMARY, BYTES):
            summaries.append(value)
    for summary in summaries:
        for number, _, value in fields(summary):
            if number == _VALUE and isinstance(value, bytes):
                tag, scalar = _of_value(value)
                if scalar is not None and step >= 0 and tag not in _NO_NUMBERS:
                    yield Scalar(step, tag, scalar, time)


def _of_value(message: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, kind, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if (number, kind) == (_TAG, BYTES):
            tag = value.decode(errors="replace")
        elif (number, kind) == (_SIMPLE, FIXED32):
            (scalar,) = struct.unpack("<f", value)
        elif (number, kind) == (_TENSOR, BYTES):
            scalar = _of_tensor(value)
    return tag, scalar


def _of_tensor(message: bytes) -> float | None:
    """Return the only number in a tensor. TensorFlow 2 writes scalars that way."""
    form, data = {_FLOAT: "<f", _DOUBLE: "<d"}, b""
    dtype = 0
    for number, _, value in fields(message):
        if number == _DTYPE and isinstance(value, int):
            dtype = value
        elif number in (_CONTENT, _FLOATS, _DOUBLES) and isinstance(value, bytes):
            data = value
    if dtype in form and len(data) == struct.calcsize(form[dtype]):
        (scalar,) = struct.unpack(form[dtype], data)
        return float(scalar)
    return None
