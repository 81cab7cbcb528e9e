"""Reads the values of wandb.log from W&B's offline log, run-ID.wandb.

A file starts with seven bytes. Then come blocks of 32 KiB with complete or partial records:
checksum (4 bytes), length (2), type (1), as in LevelDB's log. A record is a protobuf message.
https://github.com/google/leveldb/blob/main/doc/log_format.md
https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from trnslurm.node.numbers.names import canonical, with_loss
from trnslurm.node.numbers.proto import BYTES, VARINT, fields
from trnslurm.node.numbers.sighting import Sighting

SUFFIX = ".wandb"
_IDENT = b":W&B"
_FILE_HEAD, _HEAD, _BLOCK = 7, 7, 32 << 10
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MOST_RECORD = 1 << 20
# Fields of Record, HistoryRecord and HistoryItem.
_HISTORY, _ITEM, _KEY, _NESTED, _JSON = 2, 1, 1, 2, 16
_STEP_NAMES = (
    *("train/global_step", "global_step", "trainer/global_step", "train/step"),
    *("step", "iter", "iteration"),
)


class WandbReader:
    """Reads the records of one file as it grows."""

    def __init__(self) -> None:
        self._at = 0
        """The position in the file of the next data."""
        self._parts = b""

    def feed(self, data: bytes) -> tuple[list[Sighting], int]:
        """Return what complete records say, and how many bytes they take; raise a ValueError."""
        found: list[Sighting] = []
        begin = self._at
        if begin == 0:
            if len(data) < _FILE_HEAD:
                return [], 0
            if not data.startswith(_IDENT):
                raise ValueError("no log of Weights & Biases")
            self._at = _FILE_HEAD
        while True:
            left = _BLOCK - self._at % _BLOCK
            at = self._at - begin
            if left < _HEAD:
                if at + left > len(data):
                    break
                self._at += left
                continue
            if at + _HEAD > len(data):
                break
            size, kind = struct.unpack_from("<HB", data, at + 4)
            if at + _HEAD + size > len(data) or not _FULL <= kind <= _LAST:
                break
            part = data[at + _HEAD : at + _HEAD + size]
            self._at += _HEAD + size
            if kind in (_FULL, _FIRST):
                self._parts = b""
            if len(self._parts) <= _MOST_RECORD:  # a longer record is not a history record
                self._parts += part
            if kind in (_FULL, _LAST):
                found += _of_record(self._parts)
        return found, self._at - begin


def _of_record(record: bytes) -> Iterator[Sighting]:
    try:
        for number, kind, value in fields(record):
            if (number, kind) == (_HISTORY, BYTES) and isinstance(value, bytes):
                yield from _of_history(value)
    except ValueError:
        return


def _of_history(message: bytes) -> Iterator[Sighting]:
    """Yield metrics with the step that the script names. W&B's own step counts wandb.log calls."""
    numbers: dict[str, float] = {}
    for number, _, value in fields(message):
        if number == _ITEM and isinstance(value, bytes):
            name, one = _of_item(value)
            if one is not None:
                numbers[name] = one
    step = next((numbers[name] for name in _STEP_NAMES if name in numbers), None)
    kept = {n: v for n, v in numbers.items() if not n.startswith("_") and n not in _STEP_NAMES}
    named = with_loss({canonical(name): value for name, value in kept.items()})
    if step is not None and step >= 0 and step == step // 1 and named:
        yield Sighting(int(step), named, time=numbers.get("_timestamp"))


def _of_item(message: bytes) -> tuple[str, float | None]:
    names: list[str] = []
    text = b""
    for number, kind, value in fields(message):
        if kind == VARINT or not isinstance(value, bytes):
            continue
        if number in (_KEY, _NESTED):
            names.append(value.decode(errors="replace"))
        elif number == _JSON:
            text = value
    try:
        number = json.loads(text) if len(text) < 64 else None  # type: ignore[assignment]
    except ValueError:
        number = None  # type: ignore[assignment]
    real = isinstance(number, (int, float)) and not isinstance(number, bool)
    return "/".join(n for n in names if n), float(number) if real else None
