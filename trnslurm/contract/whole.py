"""Checks whether a file has its end, by what its format writes last; nothing is loaded.

The files read here can contain anything a script wrote, so each check reads only a few blocks, or
as many bytes as its budget allows.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trnslurm.contract.files import open_file

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7 to 4.3.16
_FILE, _LISTED, _END, _END64, _WHERE64 = (b"PK" + part for part in (
    b"\3\4", b"\1\2", b"\5\6", b"\6\6", b"\6\7",
))  # fmt: skip
_LOCAL_BYTES, _LISTED_BYTES, _END_BYTES, _END64_BYTES, _WHERE64_BYTES = 30, 46, 22, 56, 20
_UNKNOWN = 0xFFFFFFFF
_MOST_HEADER = 64 << 20
_MOST_PICKLE = 64 << 20
_MOST_LISTED = 16
_TAIL_BYTES = 64
# A pickle names the first key of its dict: protocols 2 and 3 by X and four bytes of length, later
# ones by \x8c and one (https://github.com/python/cpython/blob/main/Lib/pickletools.py).
_FIRST_KEY = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\}(?:q.|\x94)?\(?(?:X(.)\0\0\0|\x8c(.))(.{,64})", re.DOTALL
)


class _Directory(NamedTuple):
    """The list of a zip file's members, which is written after all of them."""

    at: int
    bytes: int
    members: int


def is_whole_zip(file: Path) -> bool:
    """Check whether a zip file, such as those of torch.save since torch 1.6, is complete.

    Its list of members, and the position of that list, are written last. A file truncated at any
    point has no valid ending.
    """
    try:
        with open_file(file) as stream:
            return _directory(stream) is not None
    except (OSError, struct.error):
        return False


def pickle_in(file: Path) -> bytes:
    """Return the pickle in a complete torch.save file, to search for words but never to load.

    Empty if it is not such a file, or if the pickle, which contains no tensors, is too long. The
    tensors are other members (torch/serialization.py, `_save`).
    """
    try:
        with open_file(file) as stream:
            return _pickle(stream)
    except (OSError, struct.error):
        return b""


def first_key(pickled: bytes) -> str:
    """Return the first key of the dict that a pickle begins with; empty if there is none."""
    match = _FIRST_KEY.match(pickled)
    if not match:
        return ""
    length = (match[1] or match[2])[0]
    return match[3][:length].decode(errors="replace")


def is_whole_safetensors(file: Path) -> bool:
    """Check whether a safetensors file has all the bytes that its header lists.

    https://github.com/huggingface/safetensors#format: eight bytes for the length of the header, the
    header, and the tensors, the last of which ends the file.
    """
    try:
        with open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MOST_HEADER):
                return False
            head = json.loads(stream.read(length))
            ends = [each["data_offsets"][1] for n, each in head.items() if n != "__metadata__"]
            return bool(size == 8 + length + max(ends, default=0))
    except (OSError, struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    except (RecursionError, MemoryError):
        return False


def ends_as_json(file: Path) -> bool:
    """Check whether an indented JSON object is complete: its last line is just a brace."""
    try:
        with open_file(file) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return stream.read().rstrip(b"\n").endswith(b"\n}")
    except OSError:
        return False


def is_whole(file: Path) -> bool | None:
    """Check whether a file is complete; return None if its format does not show it."""
    if file.name.endswith(".safetensors"):
        return is_whole_safetensors(file)
    try:
        with open_file(file) as stream:
            begins = stream.read(len(_FILE))
            if begins == _FILE:
                return _directory(stream) is not None
            return None if begins else False
    except (OSError, struct.error):
        return False


def _directory(stream: BinaryIO) -> _Directory | None:
    size = stream.seek(0, os.SEEK_END)
    end = size - _END_BYTES
    if end <= 0 or _at(stream, 0, len(_FILE)) != _FILE:
        return None
    last = _at(stream, end, _END_BYTES)
    if last[:4] != _END:
        return None
    _, _, _, members, length, at, comment = struct.unpack("<HHHHIIH", last[4:])
    if comment:
        return None
    where = _at(stream, end - _WHERE64_BYTES, _WHERE64_BYTES)
    if where[:4] == _WHERE64:
        _, end, _ = struct.unpack("<IQI", where[4:])
        last = _at(stream, end, _END64_BYTES)
        if last[:4] != _END64:
            return None
        members, length, at = struct.unpack("<QQQ", last[32:])
    fits = at + length == end and _at(stream, at, 4) == _LISTED
    return _Directory(at, length, members) if fits else None


def _pickle(stream: BinaryIO) -> bytes:
    directory = _directory(stream)
    if not directory:
        return b""
    at = directory.at
    for _ in range(min(directory.members, _MOST_LISTED)):
        listed = _at(stream, at, _LISTED_BYTES)
        method, length = (
            struct.unpack("<H", listed[10:12])[0],
            struct.unpack("<I", listed[24:28])[0],
        )
        name_bytes, extra, comment = struct.unpack("<HHH", listed[28:34])
        begins = struct.unpack("<I", listed[42:46])[0]
        name = _at(stream, at + _LISTED_BYTES, name_bytes)
        if name.endswith(b"/data.pkl"):
            if method or _UNKNOWN in (length, begins) or length > _MOST_PICKLE:
                return b""
            local = _at(stream, begins, _LOCAL_BYTES)
            head = _LOCAL_BYTES + sum(struct.unpack("<HH", local[26:30]))
            return _at(stream, begins + head, length)
        at += _LISTED_BYTES + name_bytes + extra + comment
    return b""


def _at(stream: BinaryIO, at: int, length: int) -> bytes:
    if at < 0:
        return b""
    stream.seek(at)
    return stream.read(length)
