"""Words with labels: CoNLL's text and rows, and which token has whose label."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from trnslurm.prepare.labelled.samples import UNLABELLED
from trnslurm.train.data.labelled import open_labelled
from trnslurm.train.errors import TrainError

from ..make_tokenizers import FRAMES, make_tokenizer

CONLL = """\
-DOCSTART- -X- -X- O

Ada NNP B-NP B-PER
Moore NNP I-NP I-PER
works VBZ B-VP O

Blue\tNNP\tB-NP\tB-ORG
Harbour\tNNP\tI-NP\tI-ORG
. . O O

untagged

unaffordable JJ B-NP O
bridge NN I-NP O
"""
NAMES = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG"]
SENTENCES = [
    (["Ada", "Moore", "works"], ["B-PER", "I-PER", "O"]),
    (["Blue", "Harbour", "."], ["B-ORG", "I-ORG", "O"]),
    (["unaffordable", "bridge"], ["O", "O"]),
]


@pytest.fixture
def run(prepare, tmp_path):
    """Prepare words; return the directory, its index and what was printed."""

    def start(rows, *arguments, tokenizer="train:120", seq_len=48):
        done = prepare(
            "labelled", "--output", tmp_path / "data", "--processes", 1, "--task", "ner",
            "--text", rows, "--tokenizer", tokenizer, "--seq-len", seq_len, "--holdout", 0,
            "--force", *arguments,
        )  # fmt: skip
        assert done.code == 0, done
        return tmp_path / "data", json.loads((tmp_path / "data/index.json").read_text()), done

    return start


@pytest.fixture
def conll(tmp_path):
    (tmp_path / "train.conll").write_text(CONLL)
    return tmp_path / "train.conll"


def all_samples(directory, index):
    text = open_labelled(
        directory, "train", seq_len=index["seq_len"], vocab_size=index["vocab_size"], seed=1
    )
    return text, text.fixed(0, text.num_samples)


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert"])
def test_the_first_token_of_a_word_has_its_label_as_in_transformers(run, conll, tmp_path, kind):
    own = make_tokenizer(kind, tmp_path / kind)
    labels = [word for name in NAMES for word in ("--label", name)]
    directory, index, _ = run(conll, *labels, tokenizer=own)
    text, samples = all_samples(directory, index)
    assert text.of_words and text.num_outputs == 5

    cls, sep, pad = FRAMES.get(kind, ("[CLS]", "[SEP]", "[PAD]"))
    # What comes beside the samples is what made them: RoBERTa's words begin as after a space.
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        cls_token=cls,
        sep_token=sep,
        pad_token=pad,
        add_prefix_space=kind == "roberta",
    )
    for row, (words, tags) in enumerate(SENTENCES):
        encoded = theirs(words, is_split_into_words=True, padding="max_length", max_length=48)
        ids = encoded.input_ids
        assert samples.input_ids[row].tolist() == ids
        assert samples.attention_mask[row].sum() == sum(i != index["pad_id"] for i in ids)
        expected, before = [UNLABELLED] * 48, None
        for place, word in enumerate(encoded.word_ids()):
            if word is not None and word != before:
                expected[place] = NAMES.index(tags[word])
            before = word
        assert samples.labels[row].tolist() == expected
    first = samples.labels[2][samples.labels[2] != UNLABELLED]
    assert len(first) == 2 < (samples.attention_mask[2].sum() - 2), "no word has two tokens"
    assert index["pad_id"] == {"roberta": 1}.get(kind, 0)


def test_roberta_reads_a_word_by_itself_as_in_a_text(run, conll, tmp_path):
    """Without a space before it, its tokens are those of the inside of a word."""
    own = make_tokenizer("roberta", tmp_path / "roberta")
    directory, index, _ = run(conll, tokenizer=own)
    whole = PreTrainedTokenizerFast(tokenizer_file=str(own / "tokenizer.json"))
    expected = whole(" Ada Moore works").input_ids
    _, samples = all_samples(directory, index)
    assert samples.input_ids[0][: len(expected)].tolist() == expected


def test_rows_of_a_dataset_have_numbers_or_names(run, conll, tmp_path):
    _, by_conll, done = run(conll)
    assert "left out 1 row with a word without a tag: line 11" in done.err
    assert by_conll["labels"] == ["B-ORG", "B-PER", "I-ORG", "I-PER", "O"]
    assert by_conll["metrics"] == ["entity_f1", "entity_precision", "entity_recall", "accuracy"]
    assert by_conll["splits"]["train"]["labels"] == {
        "B-ORG": 1, "B-PER": 1, "I-ORG": 1, "I-PER": 1, "O": 4,
    }  # fmt: skip

    rows = [{"tokens": w, "ner_tags": [NAMES.index(t) for t in tags]} for w, tags in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labels = [word for name in NAMES for word in ("--label", name)]
    directory, index, _ = run(tmp_path / "rows.jsonl", "--label-column", "ner_tags", *labels)
    assert index["labels"] == NAMES
    _, numbered = all_samples(directory, index)
    directory, index, _ = run(conll, *labels)
    _, named = all_samples(directory, index)
    assert numbered.labels.tolist() == named.labels.tolist()
    assert index["splits"]["train"]["samples"] == 3


def test_labels_that_are_no_tags_are_judged_word_by_word(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"tokens": ["a", "dog"], "tags": ["DET", "NOUN"]}\n' * 3)
    _, index, _ = run(tmp_path / "a.jsonl")
    assert (index["labels"], index["metrics"]) == (["DET", "NOUN"], ["accuracy"])


def test_what_is_cut_off_has_no_label_and_is_counted(run, conll, tmp_path):
    directory, index, _ = run(conll, tokenizer=make_tokenizer("bert", tmp_path / "b"), seq_len=8)
    text, samples = all_samples(directory, index)
    assert index["cut"] == 3
    assert ((samples.labels != UNLABELLED).sum(1) < 3).all()
    assert text.labelled_words(0, 3) == (samples.labels != UNLABELLED).sum()
    assert text.labelled_words(0, 6) == 2 * text.labelled_words(0, 3)  # two epochs


def test_rows_that_are_not_whole_are_counted(run, tmp_path):
    rows = [
        {"tokens": ["a", "b"], "tags": ["O", "O"]}, {"tokens": ["a", "b"], "tags": ["O"]},
        {"tokens": [], "tags": []}, {"tokens": ["a", 3], "tags": ["O", "O"]},
        {"tokens": ["a"], "tags": [None]}, {"tokens": ["c"], "tags": ["X"]},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, index, _ = run(tmp_path / "a.jsonl")
    assert {part["reason"]: part["first_lines"] for part in index["left_out"]} == {
        "more or fewer words than labels": [2], "no text": [3], "a value that is not text": [4],
        "no label": [5],
    }  # fmt: skip
    assert index["splits"]["train"]["samples"] == 2


@pytest.mark.parametrize(
    ("row", "arguments", "words"),
    [
        ({"tokens": "a b", "tags": ["O"]}, (), "expected a list of words and a list of their"),
        ({"words": ["a"], "tags": ["O"]}, (), "there is no column tokens, only words, tags"),
        ({"tokens": ["a"], "tags": ["B-X"]}, ("--label", "O", "--label", "B-Y"), "label 'B-X' is"),
        ({"tokens": ["a"], "tags": ["O"]}, ("--text-column", "a", "--text-column", "b"),
         "--text-column: --task ner reads only one column, of words"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_read_are_one_line(prepare, tmp_path, row, arguments, words):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    done = prepare(
        "labelled", "--output", tmp_path / "data", "--task", "ner", "--text", tmp_path / "a.jsonl",
        "--tokenizer", "train:100", *arguments,
    )  # fmt: skip
    assert words in done.error
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_that_frames_nothing_is_refused(prepare, tmp_path, conll):
    folder = make_tokenizer("roberta", tmp_path / "gpt")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values))
    words = ("labelled", "--output", tmp_path / "data", "--task", "ner", "--text", conll)
    done = prepare(*words, "--tokenizer", folder)
    assert "is BPE without a padding token, or without special tokens around a text" in done.error


def test_pairs_are_framed_as_roberta_does(prepare, tmp_path):
    folder: Path = make_tokenizer("roberta", tmp_path / "roberta")
    (tmp_path / "a.tsv").write_text(
        "sentence1\tsentence2\tlabel\n" + "Ada works\ta bridge\t1\n" * 2
    )
    done = prepare(
        "labelled", "--output", tmp_path / "data", "--task", "mrpc", "--text", tmp_path / "a.tsv",
        "--tokenizer", folder, "--seq-len", 40, "--holdout", 0,
    )  # fmt: skip
    assert done.code == 0, done
    index = json.loads((tmp_path / "data/index.json").read_text())
    _, samples = all_samples(tmp_path / "data", index)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = theirs("Ada works", "a bridge").input_ids  # <s> A </s></s> B </s>
    assert samples.input_ids[0][: len(expected)].tolist() == expected
    assert set(samples.input_ids[0][len(expected) :].tolist()) == {1}
    assert samples.token_type_ids.sum() == 0
    with pytest.raises(TrainError, match=r"pad_token_id is 0, but .* is padded with 1: the model"):
        open_labelled(tmp_path / "data", "train", seq_len=40, vocab_size=400, seed=1, pad_id=0)
