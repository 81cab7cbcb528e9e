"""Shards for BERT's pretraining: what is in them, against the text that they came from."""

import json

import h5py
import numpy as np
import pytest
from tokenizers import Tokenizer

ARRAYS = {
    "input_ids": ("int32", 128),
    "input_mask": ("int8", 128),
    "segment_ids": ("int8", 128),
    "masked_lm_positions": ("int32", 20),
    "masked_lm_ids": ("int32", 20),
    "next_sentence_labels": ("int8", None),
}


class Shards:
    """The samples of prepared shards, and the tokens before they were masked."""

    def __init__(self, path):
        self.index = json.loads((path / "index.json").read_text())
        vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
        self.ids = vocabulary
        self.words = {number: word for word, number in vocabulary.items()}
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        parts = []
        for entry in self.index["splits"]["train"]["shards"]:
            with h5py.File(path / entry["file"]) as file:
                parts.append({name: file[name][:] for name in file})
        self.arrays = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        self.is_masked = self.arrays["masked_lm_positions"] > 0
        self.rows = np.nonzero(self.is_masked)[0]
        self.places = self.arrays["masked_lm_positions"][self.is_masked]
        self.truth = self.arrays["masked_lm_ids"][self.is_masked]
        self.shown = self.arrays["input_ids"][self.rows, self.places]
        self.before = self.arrays["input_ids"].copy()
        self.before[self.rows, self.places] = self.truth

    def is_text(self):
        special = [self.ids[name] for name in ("[PAD]", "[CLS]", "[SEP]")]
        return ~np.isin(self.before, special)

    def parts(self, row):
        """A and B of a sample as lower-case words, and whether each continues a word."""
        ids = self.before[row]
        first, last = np.flatnonzero(ids == self.ids["[SEP]"])
        return [self.words[n] for n in ids[1:first]], [self.words[n] for n in ids[first + 1 : last]]


@pytest.fixture(scope="module")
def make(run_prepare, text, tmp_path_factory):
    def run(*arguments):
        output = tmp_path_factory.mktemp("bert") / "data"
        common = ("--text", text, "--tokenizer", "train:600", "--wrapped", "--processes", 1)
        done = run_prepare("bert", "--output", output, *common, *arguments)
        assert done.code == 0, done
        return output

    return run


@pytest.fixture(scope="module")
def shards(make):
    return Shards(make("--dupe-factor", 20, "--shards", 3))


def test_shards_are_as_nvidias_and_awss_scripts_read_them(shards):
    found = {name: (str(values.dtype), *values.shape[1:]) for name, values in shards.arrays.items()}
    assert found == {
        name: (dtype, *([] if width is None else [width]))
        for name, (dtype, width) in ARRAYS.items()
    }
    # Their loops find the files by a part of the name.
    assert [entry["file"] for entry in shards.index["splits"]["train"]["shards"]] == [
        f"bert_training_{number:05}.hdf5" for number in range(3)
    ]


def test_a_sample_is_two_parts_of_the_text_and_padding(shards):
    ids, mask = shards.before, shards.arrays["input_mask"]
    lengths = mask.sum(axis=1)
    assert (mask == (np.arange(128) < lengths[:, None])).all()
    assert (ids[:, 0] == shards.ids["[CLS]"]).all()
    assert (ids[np.arange(len(ids)), lengths - 1] == shards.ids["[SEP]"]).all()
    assert (ids[mask == 0] == shards.ids["[PAD]"]).all()
    separators = ids == shards.ids["[SEP]"]
    assert (separators.sum(axis=1) == 2).all()
    # The segment is 1 after the first separator, up to the second.
    behind = np.cumsum(separators, axis=1) - separators
    assert (shards.arrays["segment_ids"] == (behind == 1)).all()
    # Those that end with their document are shorter.
    assert lengths.min() >= 5
    assert (lengths == 128).mean() > 0.1


def test_fifteen_in_a_hundred_tokens_are_masked_and_eight_of_ten_hidden(shards):
    share = len(shards.places) / shards.is_text().sum()
    assert 0.14 < share < 0.16
    is_hidden = shards.shown == shards.ids["[MASK]"]
    is_kept = shards.shown == shards.truth
    assert abs(is_hidden.mean() - 0.8) < 0.01
    # One of 595 random tokens is the true one.
    assert abs(is_kept.mean() - 0.1) < 0.01
    others = shards.shown[~is_hidden & ~is_kept]
    assert abs(len(others) / len(shards.places) - 0.1) < 0.01
    # Any token that is text.
    assert len(np.unique(others)) > 500
    assert others.min() >= 5
    # Each place once, in order, then the unused ones; only text is masked.
    assert shards.is_text()[shards.rows, shards.places].all()
    assert (np.diff(shards.places)[np.diff(shards.rows) == 0] > 0).all()
    assert (shards.arrays["masked_lm_ids"][~shards.is_masked] == 0).all()
    assert (np.diff(shards.is_masked.astype(int), axis=1) <= 0).all()
    counts = shards.is_masked.sum(axis=1)
    assert (counts == np.clip(np.rint(shards.arrays["input_mask"].sum(axis=1) * 0.15), 1, 20)).all()


def test_half_of_the_pairs_are_random_and_the_others_follow(shards, text):
    labels = shards.arrays["next_sentence_labels"]
    assert abs(labels.mean() - 0.5) < 0.02
    paragraphs = [p for p in text.read_text().split("\n\n") if p.strip()]
    tokens = [f" {' '.join(shards.tokenizer.encode(p).tokens)} " for p in paragraphs]
    # A sample may have lost its beginning or end, and a word of each part.
    for row in range(0, len(labels), 7):
        a, b = (" ".join(part) for part in shards.parts(row))
        assert any(f" {a} " in paragraph for paragraph in tokens), a
        in_row = any(f" {a} " in p and f" {b} " in p[p.index(f" {a} ") + len(a) :] for p in tokens)
        assert any(f" {b} " in paragraph for paragraph in tokens), b
        if not labels[row]:
            assert in_row, (a, b)
    together = sum(
        any(f" {' '.join(a)} " in p and f" {' '.join(b)} " in p for p in tokens)
        for a, b in (shards.parts(row) for row in np.flatnonzero(labels))
        if len(b) > 10
    )
    assert together < 0.01 * labels.sum()


def test_every_document_is_used_and_each_pass_differs(shards, text):
    seen = {tuple(row) for row in shards.before.tolist()}
    assert len(seen) > 0.6 * len(shards.before)
    text_words = set(shards.tokenizer.encode(text.read_text()).ids)
    assert text_words <= set(np.unique(shards.before).tolist())


def test_the_index_counts_what_is_in_the_shards(shards):
    split = shards.index["splits"]["train"]
    assert split["documents"] == 138
    assert split["samples"] == len(shards.before)
    assert split["masked_tokens"] == len(shards.places)
    assert split["random_next"] == shards.arrays["next_sentence_labels"].sum()
    for key in ("samples", "masked_tokens", "random_next"):
        assert split[key] == sum(entry[key] for entry in split["shards"])


def test_the_masked_tokens_of_each_sample_stand_beside_the_shards(make):
    output = make("--seq-len", 64, "--max-pred", 7)
    shards = Shards(output)
    entry = shards.index["splits"]["train"]["masked_tokens_per_sample"]
    counts = np.fromfile(output / entry["file"], "<u2")
    assert counts.tolist() == shards.is_masked.sum(axis=1).tolist()
    assert shards.before.shape[1] == 64 and counts.max() == 7


def test_whole_words_are_masked_as_wholes(make):
    shards = Shards(make("--whole-words", "--dupe-factor", 10))
    is_chosen = np.zeros(shards.before.shape, bool)
    is_chosen[shards.rows, shards.places] = True
    goes_on = np.isin(shards.before, [n for w, n in shards.ids.items() if w.startswith("##")])
    # What continues a word is masked with it, except at the cut beginning of a part.
    follows_text = np.roll(shards.is_text(), 1, axis=1)
    linked = goes_on & follows_text
    assert linked.sum() > 1000
    assert (is_chosen == np.roll(is_chosen, 1, axis=1))[linked].all()
    assert 0.14 < len(shards.places) / shards.is_text().sum() < 0.16
    assert abs((shards.shown == shards.ids["[MASK]"]).mean() - 0.8) < 0.015


def test_test_shards_have_documents_of_their_own(make):
    output = make("--shards", 2, "--test-shards", 3, "--holdout", 0.2)
    splits = json.loads((output / "index.json").read_text())["splits"]
    assert (splits["train"]["documents"], splits["eval"]["documents"]) == (110, 28)
    names = sorted(path.name for path in output.glob("*.hdf5"))
    assert names == [
        *(f"bert_test_{number:05}.hdf5" for number in range(3)),
        *(f"bert_training_{number:05}.hdf5" for number in range(2)),
    ]
