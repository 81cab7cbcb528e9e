"""Saving: what is kept, what fails, and what never happens."""

import os
import shutil

import pytest

from trnslurm.saves import commit, directory
from trnslurm.train.checkpoint.reading import prove
from trnslurm.train.errors import TrainError


def test_the_newest_and_those_of_some_steps_are_kept(team):
    writers = team(keep_last=3, keep_every=4)
    writers.save(*range(1, 11))

    assert writers.steps() == [4, 8, 9, 10]
    assert writers.others() == []


def test_of_a_checkpoint_that_was_moved_and_linked_back_the_link_is_deleted(team, tmp_path):
    writers = team(keep_last=1)
    writers.save(1)
    first = writers.root / "step-00000001"
    first.rename(tmp_path / first.name)
    first.symlink_to(tmp_path / first.name)
    assert team(attempt=2).resume() == 1
    assert "cannot be deleted" not in str(writers.save(2)[0])
    (writers.root / "step-00000000.removed-1").symlink_to(tmp_path / first.name)
    assert team(attempt=2).resume() == 2
    assert (writers.steps(), writers.others()) == ([2], [])
    prove(tmp_path / first.name)


def test_the_only_one_is_deleted_when_the_next_is_there(team, monkeypatch):
    writers = team(keep_last=1)
    writers.save(1)
    remove, seen = directory.remove, []

    def note(path, attempt):
        seen.append((path.name, prove(writers.root / "step-00000002").step))
        remove(path, attempt)

    monkeypatch.setattr(directory, "remove", note)
    writers.save(2)
    assert seen == [("step-00000001", 2)]
    assert (writers.steps(), writers.others()) == ([2], [])


@pytest.mark.parametrize("renamed", [False, True])
def test_a_crash_before_the_old_one_is_deleted_leaves_one_to_go_on_from(team, monkeypatch, renamed):
    """Worker 0 dies when the new one is there: before the old one is renamed, or after that."""
    writers = team(keep_last=1)
    writers.save(1)

    def die(path, attempt):
        if renamed:
            directory._take_name(path, attempt)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(directory, "remove", die)
        writers.save(2)
    assert writers.steps() == ([2] if renamed else [1, 2])

    again = team(keep_last=1, attempt=2)
    assert again.resume() == 2
    assert again.holds(2)
    again.save(3)
    assert (again.steps(), again.others()) == ([3], [])


def test_the_only_one_is_not_deleted_where_the_new_one_is_cut_short(team, monkeypatch):
    writers = team(keep_last=1)
    writers.save(1)
    place = directory.put_in_place

    def cut(temporary, checkpoint, attempt):
        place(temporary, checkpoint, attempt)
        os.truncate(writers.file(2), 5)

    monkeypatch.setattr(directory, "put_in_place", cut)
    writers.save(2)
    assert team(keep_last=1, attempt=2).resume() == 1


def test_the_only_one_is_damaged(team):
    writers = team(keep_last=1)
    writers.save(1, 2)
    os.truncate(writers.file(2), 5)
    with pytest.raises(TrainError, match=r"00002 is damaged .*, and no other checkpoint is"):
        team(1, keep_last=1, attempt=2).resume()
    assert writers.steps() == [2]


def test_leftovers_of_earlier_attempts_are_deleted_at_the_start(team):
    writers = team(attempt=2)
    writers.save(1)
    for name in ("step-00000002.tmp-1", "step-00000002.tmp-3", "step-00000009.removed-1"):
        shutil.copytree(writers.root / "step-00000001", writers.root / name)

    assert team(attempt=2).resume() == 1
    assert writers.others() == ["step-00000002.tmp-3"]


def test_one_worker_that_cannot_write_fails_the_save_on_all(team, capsys):
    writers = team(3)
    writers.save(1)
    obstacle = writers.root / "step-00000002.tmp-1" / writers.file(2).name
    obstacle.mkdir(parents=True)
    capsys.readouterr()

    outcomes = writers.save(2)
    assert [bool(outcome.failure) for outcome in outcomes] == [True] * 3
    [line] = capsys.readouterr().out.splitlines()
    assert "no checkpoint of step 2: Is a directory: '/" in line
    assert "/rank-00001-of-00003.safetensors'. The" in line
    assert (writers.steps(), writers.others()) == ([1], [])
    for one in writers.checkpoints:
        with pytest.raises(TrainError, match="the last checkpoint, of step 2, could not be made"):
            one.require_last()
    assert not any(outcome.failure for outcome in writers.save(3))
    assert writers.steps() == [1, 3]
    for one in writers.checkpoints:
        one.require_last()


def test_a_silent_worker_fails_the_save_after_a_while(team, monkeypatch):
    monkeypatch.setattr(commit, "GRACE_S", 0)
    team(3).save(1)
    writers = team(3, patience_s=2)
    writers.train_to(2)
    for rank in (0, 2):
        writers.checkpoints[rank].save(2, writers.optimizers[rank])
    writers.checkpoints[0].wait()
    assert writers.checkpoints[0].last.failure == "worker 1 did not answer within 2 s"

    alone = team(2, patience_s=2)
    alone.train_to(3)
    alone.checkpoints[1].save(3, alone.optimizers[1])
    alone.checkpoints[1].wait()
    assert alone.checkpoints[1].last.failure == "worker 0 did not answer within 2 s"
    assert writers.steps() == [1]


def test_a_precompile_saves_and_finds_nothing(team):
    team().save(1)
    compiling = team(phase="precompile")

    assert compiling.save(2) == []
    assert compiling.resume() == 0
    assert compiling.steps() == [1]
