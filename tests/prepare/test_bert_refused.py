"""Shards that cannot be made: one line says where and what, and nothing is left behind."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

REPO = Path(__file__).parents[2]
KIND = ("bert", "--tokenizer", "train:300")

ARTICLE = '<doc id="1" url="" title="One">\nOne\n\nIt is short. It is old.\n</doc>\n'


@pytest.fixture
def a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One of four. It is short.\n\nTwo\n\nThree\n\nFour\n")
    return path


@pytest.fixture
def extracted(tmp_path):
    """What WikiExtractor made of some articles."""
    path = tmp_path / "extracted" / "AA" / "wiki_00"
    path.parent.mkdir(parents=True)
    path.write_text(ARTICLE + ARTICLE.replace("old", "new"))
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seq-len", 7), "--seq-len 7: must be 8 or more"),
        (("--max-pred", 126), "--max-pred 126: must be from 1 to 125"),
        (("--max-pred", 0), "--max-pred 0: must be from 1 to 125"),
        (("--masked-lm-prob", 1), "--masked-lm-prob 1.0: must be more than 0 and less than 1"),
        (("--dupe-factor", 0), "--dupe-factor 0: must be 1 or more"),
        (("--seed", -1), "--seed -1: must be 0 or more"),
        (("--shards", 0), "--shards 0: must be 1 or more"),
        (("--test-shards", 1, "--holdout", 0), "--holdout 0.0: must be more than 0"),
        (("--processes", 0), "--processes 0: must be 1 or more"),
        (("--shards", 3), "--shards 3: too few documents (4). Each shard"),
        (
            ("--shards", 1, "--test-shards", 2),
            "--shards 1 --test-shards 2: too few documents (4). Each shard",
        ),
        (("--tokenizer", "train:99"), "in train:V, V must be a whole number of 100 or"),
    ],
)
def test_values_that_cannot_be(refused, a_text, arguments, words):
    assert words in refused("--text", a_text, *arguments)


def test_a_vocabulary_smaller_than_the_alphabet(refused, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(0x4E00 + number) for number in range(200)))
    error = refused("--text", path, "--tokenizer", "train:100")
    assert error.startswith("--tokenizer train:100: the characters of the text already make 205")


def test_a_tokenizer_without_berts_special_tokens(refused, a_text, tmp_path):
    path = tmp_path / "tokenizer.json"
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[PAD]": 2}
    Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(path))
    error = refused("--text", a_text, "--tokenizer", path)
    assert error == f"{path} has no token [SEP], [MASK]: choose a BERT tokenizer"


def test_an_article_that_is_cut_off(refused, extracted):
    extracted.write_text(extracted.read_text()[:-3])
    error = refused("--wikiextractor", extracted.parents[1])
    assert error == (
        f'{extracted}: the article <doc id="1" url="" title="One"> has no </doc>: the file is '
        "truncated, so extract it again"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty: extract it again, or remove it"),
        ("Some text\n", "does not start with <doc …>: is it WikiExtractor's?"),
        (json.dumps({"text": "One"}), "does not start with <doc …>: extract without --json"),
    ],
)
def test_a_file_that_is_not_wikiextractors(refused, extracted, content, words):
    path = extracted.with_name("wiki_01")
    path.write_text(content)
    assert refused("--wikiextractor", extracted.parents[1]) == f"{path} {words}"


def test_a_directory_that_is_not_wikiextractors(refused, tmp_path):
    assert "no such directory" in refused("--wikiextractor", tmp_path / "none")
    assert "contains no wiki_* files" in refused("--wikiextractor", tmp_path)


@pytest.mark.parametrize("option", [("--document-per", "file"), ("--wrapped",), ("--column", "x")])
def test_options_that_wikiextractors_files_leave_no_room_for(refused, extracted, option):
    error = refused("--wikiextractor", extracted.parents[1], *option)
    assert error == f"remove {option[0]}, because WikiExtractor's files mark documents"


def test_without_h5py(run_prepare, a_text, tmp_path):
    (tmp_path / "h5py.py").write_text("raise ModuleNotFoundError(name='h5py')\n")
    common = ("--output", tmp_path / "data", "--text", a_text, "--tokenizer", "train:300")
    done = run_prepare("bert", *common, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
    assert done.error == "shards are HDF5 files, which require h5py: run pip install h5py"
