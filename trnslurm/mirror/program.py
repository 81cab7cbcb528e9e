"""Copies a run's checkpoints to S3 during training, or fetches the newest one before it.

    python -m trnslurm.mirror beside     reads from a pipe when training has ended
    python -m trnslurm.mirror send       sends what is missing, once; to be run by hand
    python -m trnslurm.mirror fetch s3://BUCKET/PREFIX/RUN     before the workers start

It runs in the run directory, and reads mirror.json. Nothing here can fail or delay training: it is
a separate process, uses only spare CPU and disk time, and reports its errors only as lines in the
log and in state/mirror.json.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trnslurm.contract.files import read_json, write_json
from trnslurm.contract.rundir import RunFiles
from trnslurm.contract.times import utc_time
from trnslurm.mirror.copies import (
    OnDisk,
    fetch,
    known_copies,
    not_copied,
    on_disk,
    outdated,
    remove,
    send,
    send_run,
    strays,
)
from trnslurm.mirror.store import ChangedError, MirrorError, Store

GAVE_UP = 3
"""The exit code if something is missing in S3."""
FINISH = b"finish\n"
"""The line written when training ends. If the pipe ends without it, the attempt has ended."""

_LOOK_S = 2.0
_SPARING = 20
"""The factor by which a pause is longer than the preceding look, for large directories."""
_PAUSES_S = (5.0, 10.0, 20.0, 40.0, 60.0)
_SAY_S = 600.0
_NOTE_S = 5.0
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of the three; return the exit code."""
    # From a terminal, or from Slurm to the entire job. The attempt ends this program with TERM.
    for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="mirror", allow_abbrev=False)
    parser.add_argument("what", choices=["beside", "send", "fetch"])
    parser.add_argument("place", nargs="?", help="the place in S3 to fetch from")
    options = parser.parse_args(argv)
    run = RunFiles(Path())
    settings = read_json(run.mirror_file)
    if options.what == "fetch":
        return _fetch(run, options.place or "", _patience_s(settings))
    place = settings.get("place")
    if not isinstance(place, str) or not place:
        say(f"error: {run.mirror_file.absolute()} does not name a place: set mirror")
        return 2
    if options.what == "beside":
        _step_back()
    mib_per_s = settings.get("mib_per_s")
    rate = mib_per_s * _MIB if isinstance(mib_per_s, (int, float)) and mib_per_s > 0 else math.inf
    ending = _Ending(beside=options.what == "beside")
    mirror = Mirror(run, f"{place}/{run.path.absolute().name}", rate, ending)
    return mirror.follow(_patience_s(settings))


def _patience_s(settings: dict[str, Any]) -> float:
    minutes = settings.get("wait_min")
    return 60.0 * minutes if isinstance(minutes, (int, float)) else 600.0


class _Ending:
    """What the input says: whether training has ended, and whether this attempt has."""

    def __init__(self, *, beside: bool) -> None:
        self.finishes = not beside

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until training ends."""
        if self.finishes:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            if not os.read(0, len(FINISH)):
                os._exit(GAVE_UP)  # whatever is in transit: the next attempt sends the rest
            self.finishes = True


class Mirror:
    """The copies of one run."""

    def __init__(self, run: RunFiles, place: str, bytes_per_s: float, ending: _Ending) -> None:
        self._run, self._place, self._rate, self._ending = run, place, bytes_per_s, ending
        self._store: Store | None = None
        self._copies: dict[int, dict[str, Any]] = {}
        self._unfit: dict[OnDisk, str] = {}
        """Damaged checkpoints, with the reason. They are not tried again."""
        self._why, self._since, self._said_at = "", 0.0, -math.inf
        self._noted: dict[str, Any] = {}
        self._noted_at = -math.inf
        self._looked_s = 0.0

    def follow(self, patience_s: float) -> int:
        """Copy every checkpoint that appears, until training has ended and all are there."""
        failures, moved, moved_at, ending = 0, 0, time.monotonic(), self._ending
        while True:
            finishes = ending.finishes
            try:
                self._copy_all()
                failures = 0
                unfit = [why for one, why in self._unfit.items() if one.path.exists()]
                unfit += filter(None, [not_copied(self._run)])
                self._explain("; ".join(unfit))
                if finishes:
                    return GAVE_UP if unfit else 0
            except Exception as error:  # whatever the error, the next try may succeed
                failures += 1
                self._explain(_in_words(error))
            now_moved = self._store.moved if self._store else 0
            if now_moved > moved or not finishes:
                moved, moved_at = now_moved, time.monotonic()
            left_s = moved_at + patience_s - time.monotonic()
            if finishes and left_s <= 0:
                say(f"mirror: gave up after {patience_s:.0f} s without progress: {self._why}")
                return GAVE_UP
            look_s = max(_LOOK_S, _SPARING * self._looked_s)
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1] if failures else look_s
            ending.wait(min(pause_s, left_s) if finishes else pause_s)

    def _copy_all(self) -> None:
        store = self._store or self._open()
        while missing := self._missing():
            one = missing[0]
            start, before = time.monotonic(), store.moved
            store.on_move = partial(self._note_sending, one, before)
            self._note({"sending": one.step, "bytes": one.num_bytes, "since": utc_time()})
            try:
                self._copies[one.step] = send(store, one, self._copies.pop(one.step, None))
            except FileNotFoundError:
                self._say_deleted(one, time.monotonic() - start)
                remove(store, one.step)
                continue
            except ChangedError as error:
                if one in on_disk(self._run):  # it is damaged and not being written
                    self._unfit[one] = str(error)
                continue
            sent, seconds = (store.moved - before) / 1e6, time.monotonic() - start
            say(f"mirror: step {one.step} is in {self._place}: {sent:,.1f} MB in {seconds:.1f} s")
        for step in outdated(self._run, self._copies):
            remove(store, step)
            del self._copies[step]
        self._note({})

    def _open(self) -> Store:
        store = Store(self._place, bytes_per_s=self._rate)
        send_run(store, self._run)
        self._copies = known_copies(store)
        for step in strays(store, self._run, self._copies):
            remove(store, step)
        self._store = store
        return store

    def _missing(self) -> list[OnDisk]:
        began = time.monotonic()
        there = on_disk(self._run)
        self._looked_s = time.monotonic() - began
        return [
            one
            for one in there
            if not one.is_in(self._copies.get(one.step)) and one not in self._unfit
        ]

    def _say_deleted(self, one: OnDisk, seconds: float) -> None:
        say(
            f"mirror: step {one.step} was deleted before its copy was complete, after more than "
            f"{seconds:.0f} s: raise mirror_mib_per_s or train.keep_last, or save less often"
        )

    def _explain(self, why: str) -> None:
        """Record why nothing is being copied; log the reason when it changes, and periodically."""
        if why != self._why:
            self._since, self._said_at = time.time(), -math.inf
        self._why = why
        if why and time.monotonic() > self._said_at + _SAY_S:
            self._said_at = time.monotonic()
            say(f"mirror: copying failed and will be retried: {why}")
        self._note({})

    def _note_sending(self, one: OnDisk, before: int) -> None:
        """Record periodically how much of a checkpoint is sent; at the end, lift the rate limit."""
        self._ending.wait(0)
        if self._store and self._ending.finishes:
            self._store.pace.bytes_per_s = math.inf
        if time.monotonic() >= self._noted_at + _NOTE_S:
            sent = self._store.moved - before if self._store else 0
            sending = {"sending": one.step, "sent": sent, "bytes": one.num_bytes}
            self._note(sending | {"since": utc_time()})

    def _note(self, sending: dict[str, Any]) -> None:
        """Write state/mirror.json if there is anything new."""
        facts: dict[str, Any] = {"step": max(self._copies, default=0), "why": self._why} | sending
        if self._why:
            facts["since"] = utc_time(self._since)
        if facts == self._noted:
            return
        self._noted, self._noted_at = facts, time.monotonic()
        with suppress(OSError):  # a full disk is the training's problem
            write_json(self._run.mirrored_file, facts)


def _fetch(run: RunFiles, place: str, patience_s: float) -> int:
    """Fetch the newest complete checkpoint from a place; return the exit code."""
    start = tried_at = time.monotonic()
    failures, moved, why = 0, 0, ""
    try:
        store = Store(place)
    except MirrorError as error:
        return _failed(run, f"{place}: {error}")
    while not why or time.monotonic() < tried_at + patience_s:
        try:
            return _fetch_newest(store, run, start)
        except Exception as error:  # whatever the error, the next try may succeed
            why = _in_words(error)
        if store.moved > moved:
            moved, tried_at, failures = store.moved, time.monotonic(), 0
        say(f"mirror: {why}; trying again")
        time.sleep(min(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)], patience_s))
        failures += 1
    return _failed(run, why)


def _fetch_newest(store: Store, run: RunFiles, start: float) -> int:
    for step, copy in sorted(known_copies(store).items(), reverse=True):
        try:
            path = fetch(store, run, copy)
        except ChangedError as error:
            say(f"mirror: step {step} is damaged: {error}")
            continue
        num_bytes = sum(file["bytes"] for file in copy["files"].values())
        seconds = time.monotonic() - start
        say(f"mirror: {path} from {store.place}: {num_bytes / 1e6:,.1f} MB in {seconds:.1f} s")
        return 0
    return _failed(run, f"{store.place} contains no complete checkpoint")


def _failed(run: RunFiles, why: str) -> int:
    say(f"error: {why}")
    with suppress(OSError):
        write_json(run.mirrored_file, {"step": 0, "why": why, "since": utc_time()})
    return 1


def _step_back() -> None:
    """Use only the CPU, disk and memory that others leave free."""
    _quietly(lambda: os.nice(19))
    _quietly(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))
    if shutil.which("ionice"):
        command = ["ionice", "--class", "idle", "--pid", str(os.getpid())]
        subprocess.run(command, check=False, capture_output=True)
    # If memory runs out, the kernel ends this process rather than a worker.
    _quietly(lambda: Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii"))


def _quietly(act: Callable[[], object]) -> None:
    with suppress(OSError):
        act()


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or repr(error)


def say(text: str) -> None:
    """Write a line to the log."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="surrogateescape"))
