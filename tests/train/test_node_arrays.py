"""Workers of a node share decoded shards, whoever dies, and leave nothing behind."""

import errno
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from trnslurm.train.data.shards import node as node_module
from trnslurm.train.data.shards.index import ShardSplit, index_shards
from trnslurm.train.data.shards.node import NodeArrays, share
from trnslurm.train.data.shards.reader import ShardedSamples
from trnslurm.train.errors import TrainError

from ..waiting import eventually
from .make_shards import make_shards

SIZES = [7, 40, 1, 23]
TOTAL = sum(SIZES)
DTYPE = np.dtype([("a", np.int16, (3,)), ("b", np.int8)])
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

START = multiprocessing.get_context("fork")
LIMIT_S = 600
"""For a process that should end and does not."""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """The node's disk and memory, of this test alone."""
    for name in ("disk", "memory"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(node_module, "_MEMORY", tmp_path / "memory")
    return tmp_path / "disk"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr("trnslurm.train.data.shards.windows.PIECE", 5)
    monkeypatch.setattr("trnslurm.train.data.shards.windows.PIECES_PER_WINDOW", 3)
    make_shards(tmp_path / "shards", SIZES)
    return tmp_path / "shards"


def open_shards(directory, *, shared=True, say=print):
    split = ShardSplit(directory, "train", directory.parent / "run")
    index_shards(split)
    return ShardedSamples(split, vocab_size=512, seed=1, shared=shared, say=say)


def array(number, length=4):
    made = np.zeros(length, DTYPE)
    made["a"] = number
    return made


def never():
    raise AssertionError("made a second time")


def ours(base):
    return sorted(path for path in base.iterdir() if path.is_dir())


def test_workers_read_the_same_and_each_window_is_decoded_once(directory, base, monkeypatch):
    by_itself = open_shards(directory, shared=False)
    alone = by_itself.samples(0, 2 * TOTAL)
    by_itself.close()  # it may still be at the window after them
    decode, decoded = ShardedSamples._decode, []

    def noted(shards, number):
        decoded.append(number)
        return decode(shards, number)

    monkeypatch.setattr(ShardedSamples, "_decode", noted)
    workers = [open_shards(directory) for _ in range(3)]
    for first in range(0, 2 * TOTAL, 4):
        for worker in workers:
            for found, expected in zip(worker.samples(first, 4), alone, strict=True):
                assert torch.equal(found[: 2 * TOTAL - first], expected[first : first + 4])
    assert len(decoded) == len(set(decoded)) > 6
    for worker in workers:
        worker._loader.shutdown()
    # Those behind are gone: two, the present one and the next are left.
    [shared] = ours(base)
    assert sum(path.name.isdigit() for path in shared.iterdir()) <= 5
    for worker in workers:
        assert ours(base)
        worker.close()
    assert ours(base) == []


def test_what_is_shared_is_private_to_the_user_and_goes_with_the_last_worker(base):
    first, second = (share("key", 100, DTYPE, never) for _ in range(2))
    [directory] = ours(base)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert np.array_equal(first.get(5, 4, lambda: array(5)), array(5))
    found = second.get(5, 4, never)
    assert np.array_equal(found, array(5))
    assert not found.flags.writeable
    del first
    assert directory.is_dir()
    del second
    assert ours(base) == []
    assert np.array_equal(found, array(5)), "still mapped"


def killed(make_ready):
    """Run a function in a process, which is killed once it has set its event."""
    ready = START.Event()

    def run():
        make_ready(ready)
        signal.pause()

    process = START.Process(target=run)
    process.start()
    assert ready.wait(LIMIT_S)
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL


def test_what_killed_workers_left_is_removed_at_the_next_start(base):
    def fill(ready):
        arrays = share("killed", 100, DTYPE, print)
        arrays.get(1, 4, lambda: array(1))
        ready.set()
        signal.pause()
        del arrays

    killed(fill)
    [left] = ours(base)
    assert sorted(path.name for path in left.iterdir()) == ["1", "used"]
    living = share("other", 100, DTYPE, print)
    assert left not in ours(base)
    [mine] = ours(base)
    third = share("third", 100, DTYPE, print)
    assert mine in ours(base), "somebody uses it"
    del living, third


def test_another_worker_makes_what_a_killed_one_was_making(base):
    other = share("key", 100, DTYPE, print)

    def make(ready):
        arrays = share("key", 100, DTYPE, print)

        def forever():
            ready.set()
            signal.pause()

        arrays.get(1, 4, forever)

    killed(make)
    assert np.array_equal(other.get(1, 4, lambda: array(7)), array(7))
    assert sorted(path.name for path in ours(base)[0].iterdir()) == ["1", "used"]


def test_workers_wait_for_the_one_that_makes_it(base):
    arrays = share("key", 100, DTYPE, print)
    proceed = START.Event()
    making = START.Event()

    def make():
        making.set()
        assert proceed.wait(LIMIT_S)
        return array(3)

    def run():
        share("key", 100, DTYPE, print).get(3, 4, make)

    process = START.Process(target=run)
    process.start()
    assert making.wait(LIMIT_S)

    def waits():
        process = START.Process(target=lambda: arrays.get(3, 4, never))
        process.start()
        return process

    waiting = [waits() for _ in range(3)]
    eventually(lambda: all(is_blocked(process.pid) for process in waiting))
    proceed.set()
    for each in (process, *waiting):
        each.join(LIMIT_S)
        assert each.exitcode == 0


def is_blocked(pid):
    """Whether a process waits for a lock, as Linux tells."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def test_an_error_of_the_maker_is_everyones_and_leaves_no_file(base):
    arrays = share("key", 100, DTYPE, print)

    def damaged():
        raise TrainError("damaged")

    for _ in range(2):
        with pytest.raises(TrainError, match="damaged"):
            arrays.get(1, 4, damaged)
    assert np.array_equal(arrays.get(1, 4, lambda: array(1)), array(1))
    assert sorted(path.name for path in ours(base)[0].iterdir()) == ["1", "used"]


def test_a_file_of_another_size_is_made_again(base):
    arrays = share("key", 100, DTYPE, print)
    (ours(base)[0] / "1").write_bytes(b"half")
    assert np.array_equal(arrays.get(1, 4, lambda: array(1)), array(1))
    assert np.array_equal(arrays.get(1, 4, never), array(1))


def test_a_full_disk_leaves_the_memory_and_then_each_worker_alone(base, tmp_path, monkeypatch):
    usage = shutil.disk_usage(base)
    full = {str(base)}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=99 if str(path) in full else 1000)
    )
    said = []
    arrays = share("key", 100, DTYPE, said.append)
    assert ours(base) == [] and len(ours(tmp_path / "memory")) == 1
    full.add(str(tmp_path / "memory"))
    assert share("key", 100, DTYPE, said.append), "the first worker's choice"
    assert said == []
    assert share("new", 10**9, DTYPE, said.append) is None
    memory = tmp_path / "memory"
    assert said == [
        f"{base} and {memory}: no room for 1,000 MB of shards: each worker decodes its own"
    ]
    del arrays


def test_a_disk_that_fills_up_is_told_once_and_samples_are_the_same(directory, base, monkeypatch):
    expected = open_shards(directory, shared=False).samples(0, TOTAL)
    said = []
    shards = open_shards(directory, say=said.append)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    [shared] = ours(base)
    monkeypatch.setattr("pathlib.Path.rename", full)
    for found, wanted in zip(shards.samples(0, TOTAL), expected, strict=True):
        assert torch.equal(found, wanted)
    shards._loader.shutdown()
    assert said == [
        f"{shared}: No space left on device: shards cannot be kept there: each worker decodes "
        "its own"
    ]
    assert [path.name for path in shared.iterdir()] == ["used"]


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_what_another_user_may_have_put_there_is_not_used(base, tmp_path, kind):
    path = base / f"trnslurm-shards-{os.getuid()}-key"
    if kind == "open":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
    with pytest.raises(OSError, match=r"this user's private|File exists"):
        NodeArrays(path, DTYPE, print)
    arrays = share("key", 100, DTYPE, print)
    assert arrays._directory.parent == tmp_path / "memory"
    assert not any(p.name == "used" for p in base.glob("*/*"))
