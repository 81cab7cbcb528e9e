"""The moment in which a checkpoint comes to be: what is before and beside it, and prevents it."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trnslurm.saves import directory
from trnslurm.saves.memory import HostCopy
from trnslurm.train.checkpoint import checkpoints
from trnslurm.train.errors import TrainError


class Gate:
    """Holds up the workers that write a file until it is opened."""

    def __init__(self, monkeypatch):
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.events = []
        write, copy = HostCopy.write, HostCopy.copy

        def write_later(memory, path):
            self.reached.set()
            assert self.opened.wait(600)
            written = write(memory, path)
            self.events.append(("written", int(path.parent.name[5:13])))
            return written

        def note_copy(memory, *shards):
            self.events.append("copied")
            return copy(memory, *shards)

        monkeypatch.setattr(HostCopy, "write", write_later)
        monkeypatch.setattr(HostCopy, "copy", note_copy)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_training_goes_on_while_its_former_state_is_written(team, gate):
    writers = team()
    writers.begin_save(1)
    assert gate.reached.wait(600)
    writers.train_to(2)
    for one in writers.checkpoints:
        one.poll()
    assert [one.last for one in writers.checkpoints] == [None, None]
    assert writers.steps() == []

    gate.opened.set()
    assert [outcome.failure for outcome in writers.close()] == ["", ""]
    again = team(attempt=2)
    assert again.resume() == 1
    assert again.holds(1)


def test_a_save_waits_for_a_slower_one_before_it(team, gate):
    writers = team(1)
    writers.begin_save(1)
    assert gate.reached.wait(600)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(writers.begin_save, 2)
        while writers.checkpoints[0]._device.timer.doing != "checkpoint" and not second.done():
            time.sleep(0.001)
        time.sleep(0.05)  # were it not to wait, it would copy now, and be done
        gate.opened.set()
        second.result(60)
    outcomes = writers.close()

    assert gate.events == ["copied", ("written", 1), "copied", ("written", 2)]
    assert writers.steps() == [1, 2]
    assert outcomes[0].step == 2 and outcomes[0].stall_s > 0.04


def names_in(path):
    return sorted(entry.name for entry in path.iterdir())


def test_nothing_is_a_checkpoint_before_all_of_it_is_on_the_disk(team, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append((path.name, names_in(path) if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def note_rename(source, target):
        done.append(("rename", Path(target).name))
        rename(source, target)

    writers = team()
    writers.save(1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    writers.save(2)

    before = done[: done.index(("rename", "step-00000002"))]
    after = done[len(before) :]
    final = writers.root / "step-00000002"
    names = names_in(final)
    assert names == ["manifest.json", writers.file(2, 0).name, writers.file(2, 1).name]
    for name in names:
        assert (name, (final / name).stat().st_size) in before, f"{name} is not synced, or too soon"
    assert ("step-00000002.tmp-1", names) in before, "the names in the checkpoint are not synced"
    assert ("checkpoints", ["step-00000001", "step-00000002"]) in after, "its own name is not"


def begin_attempt(writers, number, phase="train"):
    state = writers.root.parent / "state"
    state.mkdir(exist_ok=True)
    (state / f"{phase}-{number}.json").write_text("{}")


def test_an_overtaken_attempt_saves_nothing_and_stops(team):
    older = team(attempt=2)
    begin_attempt(older, 1)
    begin_attempt(older, 2)
    begin_attempt(older, 7, phase="precompile")
    assert not any(outcome.failure for outcome in older.save(1))

    begin_attempt(older, 10)
    older.begin_save(2)
    for one in older.checkpoints:
        with pytest.raises(TrainError, match=r"a newer attempt \(10\) of this run has begun"):
            one.wait()
    assert (older.steps(), older.others()) == ([1], [])
    with pytest.raises(TrainError, match="a newer attempt"):
        older.resume()


def test_between_saves_worker_0_looks_for_a_newer_attempt_now_and_then(team, monkeypatch):
    older = team(attempt=2)
    begin_attempt(older, 2)
    for one in older.checkpoints:
        one.poll()
    begin_attempt(older, 3)
    for one in older.checkpoints:
        one.poll()  # too soon to look again
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + 6)
    with pytest.raises(TrainError, match=r"a newer attempt \(3\) of this run has begun; attempt 2"):
        older.checkpoints[0].poll()
    older.checkpoints[1].poll()


def test_an_attempt_overtaken_in_its_last_moment_commits_nothing(team, monkeypatch):
    older, newer = team(attempt=1), team(attempt=2)
    older.save(1)
    look = checkpoints.newer_attempt

    def look_and_be_overtaken(environment):
        found = look(environment)
        if not newer.began:
            newer.began = True
            begin_attempt(older, 2)
            assert newer.resume() == 1
        return found

    newer.began = False
    monkeypatch.setattr(checkpoints, "newer_attempt", look_and_be_overtaken)
    older.begin_save(2)
    with pytest.raises(TrainError, match="a newer attempt"):
        older.checkpoints[0].wait()
    assert (older.steps(), older.others()) == ([1], [])


def test_an_attempt_overtaken_so_late_leaves_what_the_newer_one_has_saved(team, monkeypatch):
    older, newer = team(attempt=1), team(attempt=2)
    older.save(1)
    look = checkpoints.newer_attempt

    def look_and_be_overtaken(environment):
        found = look(environment)
        if environment.attempt == 1 and (older.root / "step-00000002.tmp-1/manifest.json").exists():
            begin_attempt(older, 2)
            assert newer.resume() == 1
            newer.save(2)
        return found

    monkeypatch.setattr(checkpoints, "newer_attempt", look_and_be_overtaken)
    older.begin_save(2)
    with pytest.raises(TrainError, match="a newer attempt"):
        older.checkpoints[0].wait()
    assert (older.steps(), older.others()) == ([1, 2], [])
    assert team(attempt=3).checkpoints[0].newest().attempt == 2


def test_two_attempts_at_once_write_as_if_the_older_were_not_there(team, gate):
    older, newer = team(attempt=1), team(attempt=2)
    older.begin_save(5)
    assert gate.reached.wait(600)
    begin_attempt(older, 2)
    newer.resume()
    newer.begin_save(5)
    gate.opened.set()

    assert not any(outcome.failure for outcome in newer.close())
    with pytest.raises(TrainError, match="a newer attempt"):
        older.close()
    manifest = team(attempt=3).checkpoints[0].newest()
    assert (manifest.step, manifest.attempt) == (5, 2)
    assert older.others() == []


def test_a_disk_that_fails_at_the_very_end_fails_the_save(team, monkeypatch):
    writers = team()
    writers.save(1)
    rename_durably = directory.rename_durably

    def fail(source, target):
        if target.name == "step-00000002":
            raise OSError(5, "Input/output error", str(target))
        rename_durably(source, target)

    monkeypatch.setattr(directory, "rename_durably", fail)
    outcomes = writers.save(2)

    (failure,) = {outcome.failure for outcome in outcomes}
    assert failure.startswith("Input/output error: '/")
    assert failure.endswith("/step-00000002'")
    assert (writers.steps(), writers.others()) == ([1], [])


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(team, monkeypatch):
    writers = team()
    writers.save(1, 2)

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directory, "remove", refuse)
    [saved, other] = writers.save(3)

    assert saved.warning == "an old checkpoint could not be deleted (Permission denied)"
    assert not other.failure
    assert writers.steps() == [1, 2, 3]
