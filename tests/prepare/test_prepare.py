"""Preparing text for real: what is in the token files, and what it depends on."""

import hashlib
import json
import re

import numpy as np
import pytest


@pytest.fixture
def paragraphs(text):
    return re.split(r"\n\n+", text.read_text().strip("\n"))


def test_every_document_comes_out_again(
    prepare, read_data, left_beside, text, paragraphs, weird_path
):
    output = weird_path / "new" / "data"
    done = prepare("--output", output, "--text", text, "--tokenizer", "train:600", "--holdout", 0.1)
    assert done.code == 0, done
    assert "tokens in 124 documents, eval " in done.out, done
    data = read_data(output)
    train, held_out = data.documents("train"), data.documents("eval")
    assert len(held_out) == 14
    # Together all of the text, each split in order; what is held out is spread evenly.
    assert sorted(train + held_out) == sorted(paragraphs)
    places = [paragraphs.index(document) for document in held_out]
    assert places == sorted(places)
    assert max(np.diff([-1, *places])) <= 10
    assert [paragraph for paragraph in paragraphs if paragraph not in held_out] == train
    assert left_beside(output) == []


def test_index_says_where_the_data_came_from(prepare, read_data, text, tmp_path):
    output = tmp_path / "data"
    done = prepare("--output", output, "--text", text, "--tokenizer", "train:600", "--json")
    data = read_data(output)
    assert json.loads(done.out) == {"output": str(output), "made": True, "index": data.index}
    for entry in (data.index["tokenizer"], *data.index["splits"].values()):
        content = (output / entry["file"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
    content = text.read_bytes()
    assert data.index["sources"] == [
        {
            "name": "text.txt",
            "split": "train",
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    ]
    assert data.index["made"]["holdout"] == 0.005
    # It has nothing from this machine.
    assert str(text.parent) not in (output / "index.json").read_text()


def test_a_large_vocabulary_takes_four_bytes(prepare, read_data, words_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("w1 w65534\n\nw2 w69999\n\nw3")
    for count, dtype in ((65_535, "uint16"), (70_000, "uint32")):
        output = tmp_path / dtype
        # The first tokenizer does not know w69999; what it makes of it does not matter.
        tokenizer = words_tokenizer(count)
        prepare("--output", output, "--text", tmp_path / "a.txt", "--tokenizer", tokenizer)
        data = read_data(output)
        assert (data.index["dtype"], data.index["vocab_size"]) == (dtype, count)
    assert data.tokens("train") == [1, 65534, 0, 2, 69999, 0]
    assert data.tokens("eval") == [3, 0]


def test_a_text_cannot_spell_the_end_of_a_text(prepare, read_data, tmp_path):
    (tmp_path / "a.txt").write_text("before <|endoftext|> after\n\nlast")
    output = tmp_path / "data"
    prepare("--output", output, "--text", tmp_path / "a.txt", "--tokenizer", "train:300")
    data = read_data(output)
    assert data.tokens("train").count(data.index["end_of_text"]) == 1
    assert data.documents("train") == ["before <|endoftext|> after"]


def test_what_a_tokenizer_would_add_or_cut_off_is_not(
    prepare, read_data, words_tokenizer, tmp_path
):
    def sequence(name):
        return {"Sequence": {"id": name, "type_id": 0}}

    path = words_tokenizer(10)
    values = json.loads(path.read_text())
    values["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "w9", "type_id": 0}}, sequence("A")],
        "pair": [sequence("A"), sequence("B")],
        "special_tokens": {"w9": {"id": "w9", "ids": [9], "tokens": ["w9"]}},
    }  # fmt: skip
    path.write_text(json.dumps(values))
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4")
    output = tmp_path / "data"
    common = ("--output", output, "--text", tmp_path / "a.txt", "--tokenizer", path)
    assert prepare(*common, "--holdout", 0).code == 0
    data = read_data(output)
    assert data.tokens("train") == [1, 2, 3, 4, 0]
    assert list(data.index["splits"]) == ["train"]


def test_the_end_of_text_can_be_named(prepare, read_data, words_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("w1\n\nw2")
    output = tmp_path / "data"
    common = ("--output", output, "--text", tmp_path / "a.txt", "--tokenizer", words_tokenizer(9))
    assert prepare(*common, "--end-of-text", "w7").code == 0
    assert read_data(output).tokens("train") == [1, 7]


def test_a_row_is_a_document_unless_it_is_said_otherwise(prepare, read_data, tmp_path):
    rows, lines = tmp_path / "a.jsonl", tmp_path / "b.txt"
    rows.write_text('{"text": "one"}\n{"text": "two\\n\\nand more"}\n{"text": "three"}\n')
    lines.write_text("four\nfive\n\nsix\n")
    output, more = tmp_path / "data", ("--tokenizer", "train:300", "--holdout", 0, "--force")

    def documents(*arguments):
        assert prepare("--output", output, "--text", *arguments, *more).code == 0
        return read_data(output).documents("train")

    assert documents(rows) == ["one", "two\n\nand more", "three"]
    assert documents(lines) == ["four\nfive", "six"]
    assert documents(rows, lines) == ["one", "two\n\nand more", "three", "four\nfive", "six"]
    blank = documents(rows, "--document-per", "blank-line")
    assert blank == ["one\ntwo\n\nand more\nthree\n"]
    # Data made by an earlier rule for rows is no longer what is asked for.
    error = prepare("--output", output, "--text", rows, *more[:-1]).error
    assert 'documents was {"per": "blank-line", ' in error and 'now {"per": "line", ' in error
