"""Prepared data as a stream of samples, and what is said when it is not whole."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch

from trnslurm.samples.order import indices
from trnslurm.train.data.text import open_text
from trnslurm.train.errors import TrainError

SEQ_LEN = 8
TOKENS = {"train": 83, "eval": 16}


def write_data(directory, *, dtype="uint16", vocab_size=1000, **changes):
    """Write prepared data as the format says, by hand: it is the contract with `prepare`."""
    directory.mkdir(parents=True)
    splits = {}
    for name, count in TOKENS.items():
        tokens = np.arange(count) * 7 % vocab_size
        data = tokens.astype("<u2" if dtype == "uint16" else "<u4").tobytes()
        entry = describe(directory / f"{name}.bin", data)
        splits[name] = entry | {"tokens": count, "documents": 2}
    index = {
        "format": 1,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "end_of_text": 0,
        "tokenizer": describe(directory / "tokenizer.json", b"{}") | {"name": "any"},
        "splits": splits,
        "sources": [],
        "made": {},
    }
    (directory / "index.json").write_text(json.dumps(index | changes))
    return directory


def describe(path, data):
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return {"file": path.name, "bytes": len(data), "sha256": digest}


def change_index(directory, change):
    index = json.loads((directory / "index.json").read_text())
    change(index)
    (directory / "index.json").write_text(json.dumps(index))


@pytest.fixture
def data(weird_path):
    return write_data(weird_path / "data")


def stream(text, epoch=0, seed=1):
    """The tokens of an epoch, back in the order of the text."""
    rows = text.samples(epoch * text.num_blocks, text.num_blocks)
    order = indices(epoch * text.num_blocks, text.num_blocks, count=text.num_blocks, seed=seed)
    return rows[torch.from_numpy(np.argsort(order))].flatten().tolist()


@pytest.mark.parametrize("split", TOKENS)
def test_no_token_is_lost_and_the_last_block_filled_up(data, split):
    text = open_text(data, split=split, seq_len=SEQ_LEN, seed=1)
    tokens = [i * 7 % 1000 for i in range(TOKENS[split])]
    assert text.num_tokens == len(tokens)
    assert text.num_blocks == math.ceil(len(tokens) / SEQ_LEN)
    for epoch in range(3):
        assert stream(text, epoch) == (tokens + tokens)[: text.num_blocks * SEQ_LEN]


def test_samples_are_what_a_model_takes(data):
    samples = open_text(data, seq_len=SEQ_LEN, seed=1).samples(3, 5)
    assert samples.dtype == torch.int64
    assert samples.shape == (5, SEQ_LEN)


def test_a_sample_depends_on_its_position_alone(data):
    text = open_text(data, seq_len=SEQ_LEN, seed=1)
    together = text.samples(0, 40)
    alone = [text.samples(position, 1) for position in reversed(range(40))]
    assert torch.equal(torch.cat(alone[::-1]), together)


def test_large_vocabularies_take_four_bytes(tmp_path):
    directory = write_data(tmp_path / "data", dtype="uint32", vocab_size=100_000)
    change_index(directory, lambda index: index["splits"]["train"].update(sha256="0"))
    data = np.arange(TOKENS["train"]) + 70_000
    (directory / "train.bin").write_bytes(data.astype("<u4").tobytes())
    text = open_text(directory, seq_len=SEQ_LEN, seed=1)
    assert stream(text)[: len(data)] == data.tolist()


def test_a_directory_opens_as_prepared_data(data):
    text = open_text(data, split="eval", seq_len=SEQ_LEN, seed=5)
    assert (text.vocab_size, text.end_of_text, text.num_blocks) == (1000, 0, 2)
    assert text.fingerprint == hashlib.sha256((data / "eval.bin").read_bytes()).hexdigest()


@pytest.mark.parametrize("file", ["train.bin", "eval.bin", "tokenizer.json"])
def test_a_truncated_or_missing_file_is_found_at_opening(data, file):
    path = data / file
    path.write_bytes(path.read_bytes()[:-1])
    refused(data, rf"{file} is \d+ bytes, expected \d+")
    path.unlink()
    refused(data, rf"{file}: No such file")


def test_a_directory_without_an_index_is_refused(tmp_path):
    refused(tmp_path, r"no prepared data \(index\.json is missing\)")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"format": 2}', "\udcff"])
def test_an_index_that_is_none_is_refused(data, text):
    (data / "index.json").write_text(text, errors="surrogateescape")
    refused(data, r"index\.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.pop("vocab_size"), "key vocab_size is missing"),
        (lambda i: i.update(vocab_size="x"), "vocab_size is 'x', expected int"),
        (lambda i: i.update(dtype="int8"), "dtype 'int8' is not one of uint16, uint32"),
        (lambda i: i.update(end_of_text=1000), "are inconsistent"),
        (lambda i: i.update(vocab_size=70_000), "are inconsistent"),
        (lambda i: i["splits"].update(eval=3), "expected keys and values"),
        (lambda i: i["splits"]["train"].pop("tokens"), "key tokens is missing"),
        (lambda i: i["splits"]["train"].update(tokens=84), "84 tokens do not match the file's 166"),
        (lambda i: i["splits"]["train"].update(file="../train.bin"), "not the name of a file"),
        (lambda i: i["tokenizer"].update(file="/etc/passwd"), "not the name of a file"),
    ],
)
def test_an_index_that_is_not_right_is_refused(data, change, words):
    change_index(data, change)
    refused(data, words)


def test_a_split_that_is_not_there_is_refused(data):
    change_index(data, lambda index: index["splits"].pop("eval"))
    refused(data, "no split eval: .* or set train.eval_every=0", split="eval")


def test_a_split_shorter_than_a_block_is_refused(data):
    refused(data, "split eval has 16 tokens, fewer than one block of 17", split="eval", seq_len=17)


def refused(directory, words, *, split="train", seq_len=SEQ_LEN):
    """The error is one line that says where, what, and how the data is made."""
    with pytest.raises(TrainError, match=words) as caught:
        open_text(directory, split=split, seq_len=seq_len, seed=1)
    message = str(caught.value)
    assert message.startswith(str(directory))
    assert "trnslurm data prepare" in message
    assert "\n" not in message
