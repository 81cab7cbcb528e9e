"""Writing down what a run says. A full disk costs lines of it, never the training."""

import json
import math
import os
from pathlib import Path
from typing import Any

from trnslurm.train.say import say


class JsonLines:
    """A file of whole lines, each a JSON object; later attempts go on in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._complains = True
        self._cut_torn_line()

    def write(self, values: dict[str, Any]) -> None:
        """Append a line; what JSON cannot hold (NaN, infinity) becomes null."""
        kept = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        line = json.dumps(kept).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) == len(line):
                return
            reason = "no space left"
        except OSError as error:
            reason = str(error.strerror)
        self._file.truncate(end)
        if self._complains:
            say(f"warning: {self._path.name} cannot be written ({reason}): lines of it are missing")
            self._complains = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_torn_line(self) -> None:
        """Cut off the line in which an attempt died."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)


class Events:
    """The same numbers for TensorBoard; none where its package is missing."""

    def __init__(self, directory: Path) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            say("no TensorBoard events: this Python has no tensorboard")
            return
        writer: Any = SummaryWriter  # not annotated
        self._writer = writer(str(directory), flush_secs=10)

    def write(self, values: dict[str, Any], *, step: int, time: float) -> None:
        """Add the numbers of a step."""
        for name, value in values.items():
            self._try(
                lambda name=name, value=value: self._writer.add_scalar(
                    name, value, step, walltime=time
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
