"""Writes a run's metrics. A full disk costs some lines, but never ends training."""

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from trnslurm.train.devices.device import say

_BLOCK_BYTES = 1 << 16
_NO_CURVES = {"attempt", "step", "steps", "time"}


class JsonLines:
    """A file of JSON objects, one per line. Later attempts append to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._complains = True

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; NaN and infinity, which JSON does not have, become null."""
        kept = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        try:
            self._append(json.dumps(kept).encode() + b"\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Omit a line, and print a warning once; the next line opens the file again."""
        self.close()
        if self._complains:
            name, why = self._path.name, error.strerror
            say(f"warning: {name} cannot be written ({why}): some of its lines will be missing")
            self._complains = False

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("a+b", buffering=0)
            # An earlier attempt may have died while writing its last line, or the disk was full.
            self._file.truncate(_end_of_lines(self._file))
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "no space left")


def _end_of_lines(file: BinaryIO) -> int:
    """Return where the last complete line of a file ends."""
    begin = file.seek(0, os.SEEK_END)
    while begin:
        end, begin = begin, max(0, begin - _BLOCK_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
    return 0


class TensorBoardEvents:
    """The same metrics for TensorBoard; nothing is written if its package is missing."""

    def __init__(self, directory: Path) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            say("no TensorBoard events: tensorboard is not installed")
            return
        writer: Any = SummaryWriter  # not annotated
        self._writer = writer(str(directory), flush_secs=10)

    def write(self, line: Mapping[str, float]) -> None:
        """Add the numbers of a step."""

        def add() -> None:
            for name in line.keys() - _NO_CURVES:
                self._writer.add_scalar(name, line[name], int(line["step"]), walltime=line["time"])

        self._try(add)

    def write_histogram(self, name: str, values: Tensor, line: Mapping[str, float]) -> None:
        """Add a histogram of values for a line's step."""
        self._try(
            lambda: self._writer.add_histogram(
                name, values, int(line["step"]), walltime=line["time"]
            )
        )

    def close(self) -> None:
        """Write what is left, and close."""
        self._try(lambda: self._writer.close())

    def _try(self, do: Any) -> None:
        if self._writer is None:
            return
        try:
            do()
        except OSError as error:
            say(f"warning: no more TensorBoard events ({error.strerror})")
            self._writer = None
