"""Damaged checkpoints: named, set aside, never loaded."""

import os

import pytest

from trnslurm.train.errors import TrainError


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size - 4)


def lose_manifest(path):
    path.with_name("manifest.json").unlink()


def empty_manifest(path):
    path.with_name("manifest.json").write_text("")


def pipe_as_manifest(path):
    lose_manifest(path)
    os.mkfifo(path.with_name("manifest.json"))


def edit_manifest(path):
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"samples": 96', '"samples": 98'))


def rename_step(path):
    path.parent.rename(path.parent.with_name("step-00000003"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_bit, "rank-00001-of-00002.safetensors: its sha256 does not match the manifest"),
        (truncate, "rank-00001-of-00002.safetensors: "),
        (os.unlink, "rank-00001-of-00002.safetensors: No such file"),
        (lose_manifest, "manifest.json: No such file"),
        (empty_manifest, "manifest.json: does not match its checksum"),
        (pipe_as_manifest, "manifest.json: not a regular file"),
        (edit_manifest, "manifest.json: does not match its checksum"),
        (rename_step, "manifest.json: belongs to step 2"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(team, capsys, damage, named):
    writers = team()
    writers.save(1, 2)
    damage(writers.file(2))
    # Nothing reads such a file, whatever it says.
    (writers.root / "latest").write_text("step-00000002")
    capsys.readouterr()

    again = team(attempt=2)
    assert again.resume() == 1
    assert again.holds(1)
    [warning] = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert named in warning
    assert again.steps() == [1]
    [_, aside] = again.others()
    assert aside.endswith(".damaged-2")
    assert warning.endswith(f"kept as {aside}")
    # It does not count among the newest, and its step can be saved again.
    again.save(2, 3)
    assert team(attempt=3).resume() == 3
    assert again.steps() == [2, 3]


def test_training_does_not_start_anew_because_everything_is_damaged(team):
    writers = team()
    writers.save(1, 2)
    for step in (1, 2):
        truncate(writers.file(step))

    with pytest.raises(TrainError, match=r"step-00000002 is damaged .*to start from step 0, move"):
        team(attempt=2).resume()
    assert writers.steps() == [1, 2]


def test_two_whole_ones_are_left_though_one_was_truncated(team):
    writers = team()
    writers.save(1, 2)
    truncate(writers.file(2))
    writers.save(3)

    assert writers.steps() == [1, 2, 3]
