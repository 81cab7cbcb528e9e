"""The cache of a node: its limit, its many writers, and one that is killed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from trnslurm.datasets.cache import Cache
from trnslurm.datasets.errors import DataError

SIZE, LIMIT, PIECES = 10_000, 100_000, 40
FORK = multiprocessing.get_context("fork")


def piece(number: int) -> bytes:
    return bytes([number]) * SIZE


def held(directory: Path) -> int:
    """The bytes of all files, by inode: a scan may see a file under both of its names."""
    sizes = {}
    with (directory / "total").open("a") as lock, os.scandir(directory) as entries:
        fcntl.flock(lock, fcntl.LOCK_EX)  # else it would see some before others have made room
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if entry.name != "total":
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def read_at_random(directory: Path, seed: int, rounds: int, dies: bool, most: Any) -> None:
    """Read pieces; die while one is written, with its bytes on the disk and without its name."""
    cache, draw = Cache(directory, LIMIT), random.Random(seed)
    if dies:
        written = os.fdatasync

        def sync(file: int) -> None:
            if draw.random() < 0.05:
                os.kill(os.getpid(), signal.SIGKILL)
            written(file)

        os.fdatasync = sync
    for _ in range(rounds):
        number = draw.randrange(PIECES)
        at = draw.randrange(SIZE - 100)
        found = cache.read(str(number), at, 100, lambda number=number: piece(number))
        assert bytes(found) == piece(number)[:100], number
        most.value = max(most.value, held(directory))


def test_four_readers_keep_the_limit_and_one_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    most = FORK.Value("q", 0)
    readers = [
        FORK.Process(target=read_at_random, args=(directory, seed, 400, seed == 0, most))
        for seed in range(4)
    ]
    for each in readers:
        each.start()
    for each in readers:
        each.join(120)
    assert [each.exitcode for each in readers] == [-signal.SIGKILL, 0, 0, 0]
    assert LIMIT * 0.8 <= most.value <= LIMIT
    # What the dead one left goes when room is needed.
    cache = Cache(directory, LIMIT)
    for number in range(PIECES):
        assert bytes(cache.read(str(number), 0, SIZE, lambda n=number: piece(n))) == piece(number)
    assert not [*directory.glob("*.new")]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", LIMIT)
    for number in range(10):
        cache.read(str(number), 0, 1, lambda n=number: piece(n))
        os.utime(tmp_path / "cache" / str(number), (number, number))
    cache.read("0", 0, 1, lambda: b"is there")  # used now
    cache.read("10", 0, 1, lambda: piece(10))
    left = {each.name for each in (tmp_path / "cache").iterdir()} - {"total"}
    assert left == {"0", *(str(number) for number in range(3, 11))}
    assert bytes(cache.map("10", lambda: b"is there")) == piece(10)


def test_a_piece_is_made_once_by_all(tmp_path: Path) -> None:
    made = FORK.Value("q", 0)

    def make() -> bytes:
        with made.get_lock():
            made.value += 1
        return piece(1)

    def read() -> None:
        Cache(tmp_path / "cache", LIMIT).map("1", make)

    readers = [FORK.Process(target=read) for _ in range(4)]
    for each in readers:
        each.start()
    for each in readers:
        each.join(60)
    assert (made.value, [each.exitcode for each in readers]) == (1, [0] * 4)


def test_what_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", LIMIT)
    with pytest.raises(DataError, match="limited to 100,000 bytes, but one piece is 100,001"):
        cache.map("1", lambda: bytes(LIMIT + 1))
    monkeypatch.setattr(os, "truncate", lambda *args: Path("/nowhere").stat())  # a full disk
    assert bytes(cache.map("2", lambda: piece(2))) == piece(2)
    assert {each.name for each in (tmp_path / "cache").iterdir()} <= {"total"}
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(DataError, match="a directory that only you can use"):
        Cache(tmp_path / "open", LIMIT)
