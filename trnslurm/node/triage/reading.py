"""Reads logs of any size and content, and makes what they say safe to print."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trnslurm.rundir import open_file

_HEAD_BYTES = 256 << 10
_TAIL_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
# Between head and tail only these are looked for: a plain search reads a gigabyte in seconds.
_ANCHORS = (b"Traceback (most recent call last)", b"\nerror: ")
_BEFORE, _AFTER = 8 << 10, 56 << 10
_MAX_FOUND = 32
# Whole sequences first, so that nothing of a colour or a window title is left over.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)
# Control characters, and those that turn the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Patterns with a wildcard take the square of a line's length.
_LONG = re.compile(r"([^\n]{1000})[^\n]+")


def clean(text: str) -> str:
    """Return text without anything that could drive a terminal; its lines stay, long ones cut."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", _ESCAPES.sub("", text)).replace("\t", "    ")
    return _LONG.sub(r"\1…", text)


def read_log(file: Path) -> str:
    """Return a log as text: whole, or of a big one its ends and what else looks like an error."""
    try:
        with open_file(file) as stream:
            size = stream.seek(0, 2)
            parts = [_read(stream, begin, end) for begin, end in _windows(stream, size)]
    except OSError:
        return ""  # gone, or not for us to read: the other logs may tell
    return clean(b"\n".join(parts).decode(errors="replace"))


def _windows(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    if size <= _HEAD_BYTES + _TAIL_BYTES:
        return [(0, size)]
    middle = range(_HEAD_BYTES, size - _TAIL_BYTES)
    windows = [(0, middle.start)]
    for place in _find(stream, middle):
        begin, end = max(windows[-1][1], place - _BEFORE), min(middle.stop, place + _AFTER)
        if begin < end:
            windows.append((begin, end))
        if len(windows) > _MAX_FOUND:
            break
    return [*windows, (middle.stop, size)]


def _find(stream: BinaryIO, places: range) -> Iterator[int]:
    """Yield where anchors stand, in order."""
    overlap = max(map(len, _ANCHORS)) - 1
    for begin in range(places.start, places.stop, _CHUNK_BYTES):
        chunk = _read(stream, begin, min(begin + _CHUNK_BYTES + overlap, places.stop))
        found: list[int] = []
        for anchor in _ANCHORS:
            at = chunk.find(anchor)
            while 0 <= at < _CHUNK_BYTES and len(found) < 3 * _MAX_FOUND:
                found.append(begin + at)
                at = chunk.find(anchor, at + _AFTER)
        yield from sorted(found)


def _read(stream: BinaryIO, begin: int, end: int) -> bytes:
    stream.seek(begin)
    return stream.read(end - begin)
