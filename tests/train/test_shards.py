"""BERT's HDF5 shards: the order of samples, what is read, what is counted, what is refused."""

import os

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trnslurm.train.data.shards import index as index_module
from trnslurm.train.data.shards.index import ShardSplit
from trnslurm.train.data.shards.reader import IGNORED, ShardedSamples
from trnslurm.train.data.shards.windows import PIECE, PIECES_PER_WINDOW, Windows
from trnslurm.train.errors import TrainError

from .make_shards import TYPES, make_shards, write_shard

SIZES = [7, 40, 1, 23]
TOTAL = sum(SIZES)


@pytest.fixture
def directory(tmp_path):
    make_shards(tmp_path / "shards", SIZES)
    return tmp_path / "shards"


@pytest.fixture
def small_pieces(monkeypatch):
    """Windows of a few samples, so that little shards have many."""
    monkeypatch.setattr("trnslurm.train.data.shards.windows.PIECE", 5)
    monkeypatch.setattr("trnslurm.train.data.shards.windows.PIECES_PER_WINDOW", 3)


def open_shards(directory, *, split="train", seed=1, vocab_size=512, beside=None):
    split = ShardSplit(directory, split, beside or directory.parent / "run")
    index_module.index_shards(split)
    return ShardedSamples(split, vocab_size=vocab_size, seed=seed)


def everything(directory):
    """Every sample as the files have it, shard after shard."""
    columns = {key: [] for key in TYPES}
    for path in sorted(directory.glob("*_training_*.hdf5")):
        with h5py.File(path) as file:
            for key, values in columns.items():
                values.append(file[key][:])
    return {key: np.concatenate(values) for key, values in columns.items()}


def places(windows, first, count):
    return np.concatenate([windows.samples(*part) for part in windows.parts(first, count)])


@given(
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=8).filter(any),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_an_epoch_holds_every_sample_once_however_it_is_cut(sizes, seed, data):
    windows = Windows(sizes, seed=seed)
    total = sum(sizes)
    epoch = data.draw(st.integers(0, 10**6))
    order = places(windows, epoch * total, total)
    assert np.array_equal(np.sort(order), np.arange(total))
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    again = places(Windows(sizes, seed=seed), epoch * total + first, count)
    assert np.array_equal(again, order[first : first + count])


def test_every_epoch_and_seed_has_an_order_of_its_own():
    sizes = [30_000, 50_000]
    orders = [places(Windows(sizes, seed=s), e * 80_000, 80_000) for s in (1, 2) for e in (0, 1)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert (order == other).sum() < 50


def test_samples_next_to_each_other_come_from_all_pieces_of_a_window():
    windows = Windows([PIECE * PIECES_PER_WINDOW * 3], seed=1)
    pieces = places(windows, 0, PIECE) // PIECE
    found, counts = np.unique(pieces, return_counts=True)
    assert len(found) == PIECES_PER_WINDOW
    assert counts.min() > 0.9 * PIECE / PIECES_PER_WINDOW


@pytest.mark.usefixtures("small_pieces")
def test_what_is_read_is_what_the_files_have(directory):
    shards, columns = open_shards(directory), everything(directory)
    whole = shards.samples(0, 2 * TOTAL)
    order = np.concatenate([places(shards._windows, 0, 2 * TOTAL)])
    names = dict(zip(("input_ids", "input_mask", "segment_ids"), whole[:3], strict=True))
    for key, found in (names | {"next_sentence_labels": whole.next_sentence}).items():
        assert found.dtype == torch.int64
        assert np.array_equal(found.numpy(), columns[key][order]), key
    for number, sample in enumerate(order):
        count = np.count_nonzero(columns["masked_lm_positions"][sample])
        for found, key, rest in (
            (whole.positions, "masked_lm_positions", 0), (whole.labels, "masked_lm_ids", IGNORED),
        ):  # fmt: skip
            assert found[number].tolist() == [
                *columns[key][sample][:count], *[rest] * (shards.max_pred - count),
            ]  # fmt: skip


@pytest.mark.usefixtures("small_pieces")
def test_any_position_is_the_same_in_whatever_order_it_is_asked_for(directory):
    whole = open_shards(directory).samples(0, 3 * TOTAL)
    shards = open_shards(directory)
    for first, count in ((2 * TOTAL - 3, 8), (0, 4), (TOTAL - 1, 2), (17, 1), (2 * TOTAL, TOTAL)):
        for found, expected in zip(shards.samples(first, count), whole, strict=True):
            assert torch.equal(found, expected[first : first + count])


@pytest.mark.usefixtures("small_pieces")
def test_masked_tokens_are_counted_without_reading(directory, monkeypatch):
    shards = open_shards(directory)
    labels = shards.samples(0, 2 * TOTAL).labels
    monkeypatch.setattr("trnslurm.train.data.shards.reader.read_rows", None)
    for first, count in ((0, 2 * TOTAL), (TOTAL - 3, 9), (5, 1)):
        expected = int((labels[first : first + count] != IGNORED).sum())
        assert open_shards(directory).masked_tokens(first, count) == expected


def test_the_index_is_made_once_and_again_when_a_shard_changes(directory, monkeypatch):
    before = open_shards(directory)
    assert (directory / "train-index.safetensors").is_file()
    assert sorted(p.name for p in directory.glob(".*")) == [], "left over"
    scan = index_module._scan
    monkeypatch.setattr(index_module, "_scan", None)
    assert open_shards(directory).fingerprint == before.fingerprint
    monkeypatch.setattr(index_module, "_scan", scan)
    make_shards(directory, [*SIZES, 3])
    after = open_shards(directory)
    assert after.num_samples == TOTAL + 3
    assert after.fingerprint != before.fingerprint
    (directory / "train-index.safetensors").write_bytes(b"damaged")
    assert open_shards(directory).fingerprint == after.fingerprint


def test_copied_shards_are_the_same_data(directory, tmp_path):
    os.utime(next(directory.glob("*.hdf5")), ns=(0, 0))
    before = open_shards(directory).fingerprint
    copy = directory.rename(tmp_path / "elsewhere")
    for path in copy.glob("*.hdf5"):
        os.utime(path, ns=(1, 1))
    assert open_shards(copy).fingerprint == before


def test_where_the_index_cannot_stand_beside_the_shards_the_run_keeps_it(
    directory, tmp_path, monkeypatch
):
    write = index_module._write

    def read_only(index, path):
        if path.parent == directory:
            raise OSError("read-only file system")
        write(index, path)

    monkeypatch.setattr(index_module, "_write", read_only)
    run = tmp_path / "run" / "data"
    assert open_shards(directory, beside=run).num_samples == TOTAL
    assert [path.name for path in run.iterdir()] == ["train-index.safetensors"]
    assert not (directory / "train-index.safetensors").exists()


def refused(directory, **options):
    with pytest.raises(TrainError) as error:
        open_shards(directory, **options).samples(0, 1)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_missing_an_empty_and_a_half_empty_folder(tmp_path, directory):
    assert refused(tmp_path / "none").endswith("none is not a directory")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").endswith(
        "empty has no shards of split train (*_training_*.hdf5)"
    )
    assert "split eval (*_test_*.hdf5): create some, or set train.eval_every=0" in refused(
        directory, split="eval"
    )
    make_shards(tmp_path / "zero", [])
    write_shard(tmp_path / "zero/a_training_0.hdf5", {
        key: np.zeros((0, width) if width else 0)
        for key, width in zip(TYPES, (32, 32, 32, 5, 5, 0), strict=True)
    })  # fmt: skip
    assert "the shards of split train" in refused(tmp_path / "zero")


def test_a_truncated_and_a_foreign_file(directory):
    path = directory / "tiny_training_1.hdf5"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    said = f"{path}: cannot be read (truncated, or not an HDF5 file): fetch or create it again"
    assert refused(directory) == said
    path.write_text("text")
    assert refused(directory) == said
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.zeros((3, 32), np.int32)
    assert "not a BERT pretraining shard: it has no input_mask, segment_ids" in refused(directory)


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("input_ids", np.zeros((7, 32), np.float32), "input_ids has no integers"),
        ("input_ids", np.zeros(7, np.int32), "its samples differ in length"),
        ("segment_ids", np.zeros((6, 32), np.int8), "segment_ids has shape (6, 32), but input_ids"),
        ("masked_lm_positions", np.zeros((7, 4), np.int32), "masked_lm_positions has shape (7, 4)"),
        ("input_ids", np.full((7, 32), 512), "input_ids contains 512, but model.vocab_size is 512"),
        (
            "masked_lm_positions",
            np.full((7, 5), 32),
            "contains 32, but the length of a sample is 32",
        ),
        (
            "next_sentence_labels",
            np.full(7, -1),
            "next_sentence_labels contains -1, but the number",
        ),
    ],
)
def test_wrong_columns(directory, key, values, said):
    path = directory / "tiny_training_0.hdf5"
    with h5py.File(path, "a") as file:
        del file[key]
        file[key] = values
    assert said in refused(directory)


def test_shards_of_other_lengths(directory):
    make_shards(directory, [3], split="training_more", seq_len=64)
    assert refused(directory).endswith(
        "tiny_training_more_0.hdf5: samples of 64 tokens, at most 5 of them masked, but "
        "tiny_training_0.hdf5 has 32 and 5"
    )


def test_a_shard_damaged_inside(directory):
    """Its outline is whole, what is compressed is not."""
    open_shards(directory)
    path = directory / "tiny_training_1.hdf5"
    with h5py.File(path) as file:
        chunk = file["input_ids"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    assert f"{path}: damaged (" in refused(directory)
