"""The sources of metrics: each finds its files and turns new data in them into steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trnslurm.contract import metrics
from trnslurm.contract.files import load_json, read_file
from trnslurm.node.numbers import table, tensorboard, trainer, wandb
from trnslurm.node.numbers.files import Tail
from trnslurm.node.numbers.log import Earlier, LogReader
from trnslurm.node.numbers.names import HELD_OUT, canonical, with_loss
from trnslurm.node.numbers.sighting import Sighting, Steps

# What one look reads from one file. If a log grows faster, its middle is skipped.
_LOG_BYTES = 256 << 10  # 3,000 lines, which take 0.2 s
_LOOK_BYTES = 1 << 20
_BACKLOG_BYTES = 8 << 20
_TABLE_BYTES = 16 << 20
_MOST_FILES = 16
_MOST_LINE = 64 << 10
_HELD_OUT_PARTS = {"val", "valid", "validation", "eval", "evaluation", "dev"}


class Source(ABC):
    """One format in which a script writes its metrics."""

    read = ""
    """The value of `read` in the lines of metrics.jsonl."""

    def __init__(self) -> None:
        self.steps = Steps()

    @abstractmethod
    def look(self) -> None:
        """Read new data into `steps`."""

    def offer(self, files: Iterable[Path]) -> None:  # noqa: B027 (the log is no such file)
        """Accept the run's files. Some of them may belong to the source."""


class Log(Source):
    """The first node's log."""

    read = metrics.LOG

    def __init__(self, path: Path, earlier: Earlier | None = None) -> None:
        super().__init__()
        self._tail = Tail(path)
        self.reader = LogReader(earlier)
        self._part = b""

    def look(self) -> None:
        """Read the lines, and what bars have overwritten. An unfinished line waits."""
        if self._tail.behind() > _BACKLOG_BYTES:
            self._tail.done(self._tail.behind() - _LOG_BYTES)
            self._part = b""
        with suppress(OSError):
            data, first = self._tail.read(_LOG_BYTES)
            self._tail.done(len(data))
            data = (b"" if first else self._part) + data
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._part = data[whole:][-_MOST_LINE:]
            for line in data[:whole].decode(errors="replace").split("\n"):
                for seen in self.reader.feed(line):
                    self.steps.add(seen)
        if self.reader.contradicts:
            self.steps.clear()


class Epochs(Source):
    """The losses of epochs in the first node's log, which count if the log names no step."""

    read = metrics.EPOCHS

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def look(self) -> None:
        """Take what the log's reader has found."""
        if not self._log.reader.names_steps:
            for seen in self._log.reader.epochs.take():
                self.steps.add(seen)

    def end(self) -> None:
        """Take the loss of the last epoch, too."""
        if not self._log.reader.names_steps:
            for seen in self._log.reader.epochs.take(end=True):
                self.steps.add(seen)


class _Grown(Source):
    """Files that grow by records and that this attempt started."""

    def __init__(self, old: Iterable[Path]) -> None:
        """Skip files of earlier attempts."""
        super().__init__()
        self._old = {p for p in old if self._is_one(p)}
        self._files: dict[Path, tuple[Tail, wandb.WandbReader]] = {}

    def offer(self, files: Iterable[Path]) -> None:
        """Accept new files."""
        for path in files:
            new = self._is_one(path) and path not in self._old and path not in self._files
            if new and len(self._files) < _MOST_FILES:
                self._files[path] = (Tail(path), wandb.WandbReader())

    def look(self) -> None:
        """Read complete records. A damaged file is ignored from then on."""
        for path, (tail, reader) in [*self._files.items()]:
            try:
                data, _ = tail.read(_LOOK_BYTES)
                found, done = self._read(path, reader, data)
            except OSError:
                continue
            except ValueError:
                del self._files[path]
                self._old.add(path)
                continue
            tail.done(done)
            for seen in found:
                self.steps.add(seen)

    @abstractmethod
    def _is_one(self, path: Path) -> bool:
        """Check by its name whether a file belongs to this source."""

    @abstractmethod
    def _read(
        self, path: Path, reader: wandb.WandbReader, data: bytes
    ) -> tuple[list[Sighting], int]:
        """Return what complete records say, and how many bytes they take; raise a ValueError."""


class Tensorboard(_Grown):
    """The event files of one or more writers."""

    read = metrics.TENSORBOARD

    def _is_one(self, path: Path) -> bool:
        return tensorboard.NAME in path.name

    def _read(
        self, path: Path, reader: wandb.WandbReader, data: bytes
    ) -> tuple[list[Sighting], int]:
        found, done = tensorboard.scalars(data)
        held_out = not _HELD_OUT_PARTS.isdisjoint(path.parent.name.lower().split("_"))
        seen = []
        for scalar in found:
            name = canonical(scalar.tag)
            if held_out and name and not name.startswith(HELD_OUT):
                name = f"{HELD_OUT}{name}"
            if name:
                numbers = with_loss({name: scalar.value})
                seen.append(Sighting(scalar.step, numbers, None, scalar.time))
        return seen, done


class Wandb(_Grown):
    """The offline logs of Weights & Biases."""

    read = metrics.WANDB

    def _is_one(self, path: Path) -> bool:
        return path.suffix == wandb.SUFFIX

    def _read(
        self, path: Path, reader: wandb.WandbReader, data: bytes
    ) -> tuple[list[Sighting], int]:
        return reader.feed(data)


class Trainer(Source):
    """The state file in each of Trainer's checkpoints."""

    read = metrics.TRAINER

    def __init__(self, old: Iterable[Path]) -> None:
        """Skip the steps in checkpoints of earlier attempts, from which this attempt started."""
        super().__init__()
        self._done = -1
        self._seen: dict[Path, float] = {}
        for path in _newest([p for p in old if p.name == trainer.NAME]):
            for seen in self._history(path):
                self._done = max(self._done, seen.step)

    def offer(self, files: Iterable[Path]) -> None:
        """Read the newest states that have changed."""
        for path in _newest([p for p in files if p.name == trainer.NAME]):
            for seen in self._history(path):
                if seen.step > self._done:
                    self.steps.add(seen)

    def look(self) -> None:
        """Do nothing, because a state file never grows: it is written with its checkpoint."""

    def _history(self, path: Path) -> list[Sighting]:
        with suppress(OSError, ValueError):
            changed = path.stat().st_mtime
            if self._seen.get(path) != changed:
                self._seen[path] = changed
                return trainer.history(load_json(path))
        return []


class Table(Source):
    """Lightning's metrics.csv. Lightning rewrites the whole file for each new value."""

    read = metrics.CSV

    def __init__(self, old: Iterable[Path]) -> None:
        """Skip rows of earlier attempts."""
        super().__init__()
        self._marks = {p: _mark(p) for p in old if p.name == table.NAME}
        self._files: list[Path] = []
        self._old = {p: [seen.step for seen in _rows(p)] for p in _newest([*self._marks])}
        """The steps of earlier attempts. An attempt that starts over writes a new table there."""

    def offer(self, files: Iterable[Path]) -> None:
        """Accept tables that are new or have changed since the attempt started."""
        new = [p for p in files if p.name == table.NAME and self._marks.get(p) != _mark(p)]
        for path in new:
            if path not in self._files and len(self._files) < _MOST_FILES:
                self._files.append(path)

    def look(self) -> None:
        """Read a changed table in full."""
        for path in self._files:
            if (mark := _mark(path)) == self._marks.get(path):
                continue
            self._marks[path] = mark
            rows, old = _rows(path), self._old.get(path, [])
            same = sum(seen.step == step for seen, step in zip(rows, old))
            for seen in rows[same:] if same == min(len(rows), len(old)) else rows:
                self.steps.add(seen)


def _rows(path: Path) -> list[Sighting]:
    with suppress(OSError):
        return table.rows(read_file(path, _TABLE_BYTES).decode(errors="replace"))
    return []


def _newest(paths: list[Path]) -> list[Path]:
    """Return the files that changed last, oldest first."""
    return sorted(paths, key=lambda p: _mark(p)[1])[-_MOST_FILES:]


def _mark(path: Path) -> tuple[int, float]:
    try:
        found = path.stat()
    except OSError:
        return 0, -math.inf
    return found.st_size, found.st_mtime
