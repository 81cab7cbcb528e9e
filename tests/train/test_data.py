"""The stream of samples: every block once an epoch, in an order of its own each time."""

import pytest
import torch

from trnslurm.train.data import END_OF_TEXT, ByteText
from trnslurm.train.errors import TrainError

TEXT = bytes(range(100))
SEQ_LEN = 10
BLOCKS = 10


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def open_text(path, seed=1):
    return ByteText(path, seq_len=SEQ_LEN, seed=seed)


def test_the_end_of_the_text_is_a_token(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"ab")
    assert ByteText(path, seq_len=3, seed=1).blocks.tolist() == [[97, 98, END_OF_TEXT]]


def test_an_epoch_holds_every_block_once(text_path):
    text = open_text(text_path)
    for epoch in range(3):
        rows = text.samples(epoch * BLOCKS, BLOCKS)
        assert sorted(rows.tolist()) == text.blocks.tolist()


def test_every_epoch_and_seed_has_an_order_of_its_own(text_path):
    orders = [open_text(text_path, seed).order(epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_sample_depends_on_its_position_alone(text_path):
    together = open_text(text_path).samples(0, 3 * BLOCKS)
    # Backwards and one by one, as no worker does: the order of the questions does not matter.
    text = open_text(text_path)
    alone = [text.samples(position, 1) for position in reversed(range(3 * BLOCKS))]
    assert torch.equal(torch.cat(alone[::-1]), together)


def test_a_text_shorter_than_a_block_is_refused(text_path):
    with pytest.raises(TrainError, match="shorter than one block of 200 bytes"):
        ByteText(text_path, seq_len=200, seed=1)


def test_a_missing_text_is_refused(tmp_path):
    with pytest.raises(TrainError, match=r"none\.txt cannot be read"):
        open_text(tmp_path / "none.txt")
