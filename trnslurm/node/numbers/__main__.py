"""Writes a script's metrics into metrics.jsonl, unless the script reports them itself.

    python -m trnslurm.node.numbers --task=PID

It runs on the first node until the task ends. It stops when the script itself reports: when this
attempt has a line that this program did not write. An error in this program affects nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trnslurm.contract.files import open_file
from trnslurm.contract.metrics import EPOCHS, LOG, READ, is_reported
from trnslurm.contract.variables import Variable
from trnslurm.node.guard import Watched
from trnslurm.node.numbers.choice import Choice
from trnslurm.node.numbers.files import found_in
from trnslurm.node.numbers.log import Earlier
from trnslurm.node.numbers.outside import Outside
from trnslurm.node.numbers.sighting import line_of
from trnslurm.node.numbers.sources import Epochs, Log, Source, Table, Tensorboard, Trainer, Wandb
from trnslurm.node.state import RUN

LEAST_S, MOST_S = 3.0, 20.0
"""The shortest and the longest pause between two looks, while metrics come and while none come."""
# Listing directories takes longer than reading new data, so it gets at most this share of the time.
_SHARE = 0.01
_FILES_S = 15.0
_LAST_LOOKS = 8
_OWN_BYTES = 4 << 20


def main() -> int:
    """Look until the task ends, or the script reports."""
    parser = argparse.ArgumentParser(prog="numbers", allow_abbrev=False)
    parser.add_argument("--task", type=int, required=True, help="the node.sh process")
    options = parser.parse_args()
    with suppress(OSError):
        os.nice(10)
    # The last lines arrive at the end, when the task's parent ends all that is left.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task = Watched(options.task)
    reader = Numbers(int(os.environ[Variable.ATTEMPT]), os.environ.get(Variable.CHECKPOINTS, ""))
    # A standby step has no attempt yet.
    while not reader.begun():
        if task.ends_within(LEAST_S):
            return 0
    while not task.ends_within(reader.pause_s):
        if not reader.look(time.time()):
            return 0
    reader.look(time.time(), end=True)
    return 0


class Numbers:
    """The numbers of one attempt."""

    def __init__(self, attempt: int, checkpoints: str = "") -> None:
        """Start before the workers, so that whatever exists already is from earlier attempts."""
        self._attempt = attempt
        self.pause_s = LEAST_S
        places = [RUN.path / "work", Path(checkpoints) if checkpoints else RUN.checkpoints]
        self._places = [place.resolve() for place in places]
        self._outside = Outside(time.time(), self._places)
        old = [*found_in(self._places)]
        self._written = Written(RUN.metrics_file, attempt)
        log = Log(RUN.node_log("train", attempt, 0), earlier(RUN.metrics_file, attempt))
        self._epochs = Epochs(log)
        self._sources: list[Source] = [
            Tensorboard(old),
            Trainer(old),
            Table(old),
            Wandb(old),
            log,
            self._epochs,
        ]
        self._choice = Choice(self._sources)
        self._find_at = 0.0

    def begun(self) -> bool:
        """Check whether the attempt has started."""
        return RUN.state_file("train", self._attempt).exists()

    def look(self, now: float, *, end: bool = False) -> bool:
        """Look once; return False if the script reports its metrics itself."""
        for source in self._sources:
            source.steps.now = now
        self._find(now, end=end)
        for source in self._sources:
            for _ in range(_LAST_LOOKS if end else 1):
                source.look()
        if end:
            self._epochs.end()
        if self._written.by_others():
            return False
        due = self._choice.due(now, end=end)
        lines = [json.dumps(line_of(seen, self._attempt, read)) for read, seen in due]
        if lines:
            with suppress(OSError):
                self._written.append("".join(f"{line}\n" for line in lines))
        self.pause_s = LEAST_S if lines else min(MOST_S, 1.2 * self.pause_s)
        return True

    def _find(self, now: float, *, end: bool) -> None:
        """Look for files, so rarely that it costs little."""
        if now < self._find_at and not end:
            return
        start = time.monotonic()
        found = [*found_in(self._places), *self._outside.found()]
        for source in self._sources:
            source.offer(found)
        self._find_at = now + max(_FILES_S, (time.monotonic() - start) / _SHARE)


def earlier(file: Path, attempt: int) -> Earlier | None:
    """Return what earlier attempts' lines say about epochs, or None for the first attempt."""
    if attempt == 1:
        return None
    lines: list[bytes] = []
    with suppress(OSError), open_file(file) as stream:
        lines = stream.read(_OWN_BYTES).splitlines()
    told = [line for line in map(_object, lines) if isinstance(line.get("epoch"), float)]
    places = [line for line in told if line.get(READ) == LOG]
    epochs = [line for line in told if line.get(READ) == EPOCHS]
    if places:
        restarts = not any("steps" in line for line in places)
        return Earlier(int(places[0]["epoch"]), restarts)
    if epochs and isinstance(step := epochs[0].get("step"), int):
        return Earlier(int(epochs[0]["epoch"]) - step + 1)
    return Earlier()


def _object(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


class Written:
    """What metrics.jsonl contains, and who else writes to it."""

    def __init__(self, file: Path, attempt: int) -> None:
        self._file, self._attempt = file, attempt
        self._at = self._size()
        self._part = b""
        self._others = False

    def by_others(self) -> bool:
        """Check whether any other program has written a line of this attempt."""
        if self._others or self._size() <= self._at:
            return self._others
        with suppress(OSError), open_file(self._file) as stream:
            stream.seek(self._at)
            data = stream.read(_OWN_BYTES)
            self._at += len(data)
            *lines, self._part = (self._part + data).split(b"\n")
            self._others = any(self._is_of_script(line) for line in lines)
        return self._others

    def append(self, text: str) -> None:
        """Append complete lines in one write."""
        data = text.encode()
        with self._file.open("ab", buffering=0) as stream:
            stream.write(data)

    def _is_of_script(self, line: bytes) -> bool:
        told = _object(line)
        return told.get("attempt") == self._attempt and is_reported(told)

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except OSError:
            return 0


if __name__ == "__main__":
    sys.exit(main())
