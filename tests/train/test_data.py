"""A file's bytes as a stream of samples: every block once an epoch, and no byte lost."""

import numpy as np
import pytest
import torch

from trnslurm.samples.order import indices
from trnslurm.train.data.text import END_OF_TEXT, open_text
from trnslurm.train.errors import TrainError

# 190 to train on and 10 held out.
TEXT = bytes(range(200))
SEQ_LEN = 10
BLOCKS = 20


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def open_bytes(path, seed=1, split="train"):
    return open_text(path, split=split, seq_len=SEQ_LEN, seed=seed)


def blocks_in_order(text, epoch=0):
    """The blocks of an epoch, back in the order of the text."""
    rows = text.samples(epoch * text.num_blocks, text.num_blocks)
    order = indices(epoch * text.num_blocks, text.num_blocks, count=text.num_blocks, seed=1)
    return rows[torch.from_numpy(np.argsort(order))]


def test_every_byte_and_the_end_of_the_text_are_tokens(text_path):
    text = open_bytes(text_path)
    tokens = blocks_in_order(text).flatten().tolist()
    # The last block is filled up from the beginning.
    assert tokens == [*TEXT[:190], END_OF_TEXT, *TEXT[:9]]
    assert text.num_blocks == BLOCKS
    assert text.num_tokens == 191


def test_the_last_twentieth_is_held_out(text_path):
    text = open_bytes(text_path, split="eval")
    assert blocks_in_order(text).flatten().tolist() == [*TEXT[190:], END_OF_TEXT, *TEXT[190:199]]


def test_every_epoch_and_seed_has_an_order_of_its_own(text_path):
    epochs = [
        open_bytes(text_path, seed).samples(epoch * BLOCKS, BLOCKS)
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len({str(rows.tolist()) for rows in epochs}) == 4


def test_another_text_has_another_fingerprint(text_path):
    before = open_bytes(text_path).fingerprint
    assert open_bytes(text_path, seed=2).fingerprint == before
    text_path.write_bytes(TEXT[::-1])
    assert open_bytes(text_path).fingerprint != before


@pytest.mark.parametrize(("split", "part"), [("train", "the text"), ("eval", "last twentieth")])
def test_a_text_shorter_than_a_block_is_refused(text_path, split, part):
    with pytest.raises(TrainError, match=rf"{part}.* shorter than one block of 200 bytes"):
        open_text(text_path, split=split, seq_len=200, seed=1)


def test_a_missing_text_is_refused(tmp_path):
    with pytest.raises(TrainError, match=r"none\.txt cannot be read"):
        open_bytes(tmp_path / "none.txt")
