"""Bad input: one line says where and what, exit code 1, and nothing is left behind."""

import json
import os
from pathlib import Path

import pytest

KIND = ()
# Text is read in blocks of this size.
BLOCK = 1 << 20
TOKENIZER = ("--tokenizer", "train:300")


@pytest.fixture
def a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    return path


@pytest.mark.parametrize(
    ("before", "bad"),
    [
        (5, b"\xff\n"),
        (8, b"\xc3"),  # the end of the file in the middle of a letter
        (BLOCK, b"\x80"),
        (BLOCK - 1, b"\xc3\n"),  # the letter begins in one block and fails in the next
    ],
)
def test_text_that_is_not_utf8(refused, tmp_path, before, bad):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"x" * before + bad)
    error = refused("--text", path, *TOKENIZER)
    words = f"{path}: not UTF-8 at byte {before}, on line 1: convert it first"
    assert error.startswith(words)


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_no_text_at_all(refused, tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    error = refused("--text", path, "--tokenizer", "train:300")
    assert error.startswith("there is no text")


def test_a_single_document_cannot_be_held_out(refused, prepare, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("all in one")
    error = refused("--text", path, *TOKENIZER)
    assert error.startswith("too few documents (1) to hold out a share of 0.005: use")
    assert prepare("--output", tmp_path / "d", "--text", path, *TOKENIZER, "--holdout", 0).code == 0


@pytest.mark.parametrize("more", ["x", "x/y"])
def test_an_output_below_a_file(prepare, a_text, more):
    output = a_text / more
    error = prepare("--output", output, "--text", a_text, *TOKENIZER).error
    assert error == f"{output}: {a_text} is not a directory: choose another name"


def test_a_missing_file(refused, tmp_path):
    error = refused("--text", tmp_path / "none.txt", *TOKENIZER)
    assert error == f"{tmp_path}/none.txt: cannot be read (No such file or directory)"


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv"])
def test_rows_that_are_not_read(refused, tmp_path, name):
    (tmp_path / name).write_text("text\tlabel\n")
    assert refused("--text", tmp_path / name, *TOKENIZER) == (
        f"{tmp_path}/{name}: only .jsonl, .parquet, .arrow are read as rows: convert it to JSON "
        "lines, or rename it to .txt to read it as text"
    )


def test_a_directory_without_text(refused, tmp_path):
    (tmp_path / "a.md").touch()
    error = refused("--text", tmp_path, *TOKENIZER)
    assert error == (
        f"--text or --input {tmp_path}: this directory contains no text files (.txt, .jsonl)"
    )


@pytest.mark.parametrize("option", ["--text", "--input", "--dataset"])
def test_a_directory_that_may_not_be_read(refused, monkeypatch, tmp_path, option):
    closed = tmp_path / "texts" / "closed"
    closed.mkdir(parents=True)
    (tmp_path / "texts" / "train.txt").write_text("one\n\ntwo\n")
    scandir = os.scandir

    def refuse(path):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read what others may not
    error = refused(option, tmp_path / "texts", *TOKENIZER)
    assert error == f"{closed}: cannot be read (Permission denied)"


@pytest.mark.parametrize("name", ["train:", "train:x", "train:256", "train:-1", "train:99999999"])
def test_a_tokenizer_that_cannot_be_trained(refused, a_text, name):
    assert f"--tokenizer {name}: in train:V, V must be a whole number of 257" in refused(
        "--text", a_text, "--tokenizer", name
    )


def test_an_unknown_tokenizer(refused, a_text, tmp_path):
    assert "--tokenizer gpt2: no such file" in refused("--text", a_text, "--tokenizer", "gpt2")
    # A directory without one.
    assert "no such file" in refused("--text", a_text, "--tokenizer", tmp_path)
    broken = tmp_path / "broken.json"
    for content in ("", "{}", "[1]", '{"version": "1.0"'):
        broken.write_text(content)
        error = refused("--text", a_text, "--tokenizer", broken)
        assert error.startswith(f"{broken}: not a valid tokenizer.json (")
    assert "needs a tokenizer" not in error
    assert refused("--text", a_text).startswith("--tokenizer is required: pass a tokenizer")


def test_a_tokenizer_without_an_end_of_text(refused, a_text, words_tokenizer):
    error = refused("--text", a_text, "--tokenizer", words_tokenizer(9), "--end-of-text", "</x>")
    assert "has no token </x>: name the token that ends a text with --end-of-text" in error
    assert refused("--text", a_text, *TOKENIZER, "--end-of-text", "</x>") == (
        "--end-of-text </x>: a trained tokenizer has no such token, only <|endoftext|>: "
        "remove the option"
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--holdout", 1, "--holdout 1.0: must be 0 or more and less than 1"),
        ("--holdout", -0.1, "--holdout -0.1: must be"),
        ("--holdout", "nan", "--holdout nan: must be"),
        ("--processes", 0, "must be 1 or more"),
        ("--chunk-bytes", 0, "must be 1 or more"),
        ("--document-start", "(", "--document-start (: not a valid regular"),
    ],
)
def test_options_out_of_bounds(refused, a_text, option, value, words):
    assert words in refused("--text", a_text, *TOKENIZER, f"{option}={value}")


@pytest.mark.parametrize(
    "line", ["3", '"x"', "[]", '{"other": "x"}', '{"text": null}', '{"text": "\\ud800"}']
)
def test_rows_without_a_text(refused, tmp_path, line):
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"text": "good"})
    path.write_text(f"{good}\n{line}\n")
    error = refused("--text", path, *TOKENIZER)
    assert error.startswith(
        f"{path}: the line at byte {len(good) + 1} is not a row with a text 'text'"
    )
    # Workers find it too, where the tokenizer was trained before.
    assert "\n" not in error


@pytest.mark.parametrize(
    ("line", "why"), [("{", "Expecting property name"), ("[" * 100_000, "nested too deeply")]
)
def test_lines_that_are_not_json(refused, tmp_path, line, why):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    error = refused("--text", path, *TOKENIZER)
    assert error.startswith(f"{path}: the line at byte 17 is not valid JSON ({why}")
    assert error.endswith("): each line must be a row") and "\n" not in error


def test_what_workers_find_wrong_is_one_line_too(run_prepare, words_tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w1"}\n{"text": 2}\n')
    output, two_chunks = tmp_path / "data", ("--text", path, path, "--processes", 2)
    done = run_prepare("--output", output, *two_chunks, "--tokenizer", words_tokenizer(9))
    assert done.error.startswith(f"{path}: the line at byte 15 is not a row with a text 'text'")
    assert not output.exists()


def test_wrong_usage_is_exit_code_2(prepare, a_text, tmp_path):
    for arguments in ([], ["--output", tmp_path / "x"], ["--text", a_text], ["fetch"]):
        assert prepare(*arguments).code == 2
