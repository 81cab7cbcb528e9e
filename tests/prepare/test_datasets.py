"""Directories of a dataset's files: which are read, as what split, in which format."""

import importlib
import json
import os
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

ARTICLES = [
    [" = One = \n", "First text . \n", " = = Part = = \n", "More of it . \n"],
    [" = Two = \n", "Second text . \n"],
    [" = Three = \n", "Third text . \n"],
]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows))


@pytest.fixture
def run(prepare, read_data, tmp_path):
    def run(directory, *arguments, tokenizer=("--tokenizer", "train:300")):
        output = tmp_path / "prepared"
        done = prepare("--output", output, "--dataset", directory, *tokenizer, *arguments)
        assert done.code == 0, done
        return read_data(output)

    return run


def test_a_dataset_has_its_own_split_for_evaluation(run, prepare, tmp_path):
    directory = tmp_path / "set"
    write_rows(directory / "train-00000-of-00002.jsonl", ["b", "c"])
    write_rows(directory / "train-00001-of-00002.jsonl", ["", "d"])
    write_rows(directory / "validation.jsonl", ["e", "f"])
    write_rows(directory / "test.jsonl", ["never"])
    (directory / "README.md").write_text("not text")
    write_rows(directory / ".cache" / "train.jsonl", ["never"])
    data = run(directory)
    assert data.documents("train") == ["b", "c", "d"]
    assert data.documents("eval") == ["e", "f"]
    assert [source["split"] for source in data.index["sources"]] == ["train", "train", "eval"]
    common = ("--output", tmp_path / "x", "--dataset", directory, "--tokenizer", "train:300")
    assert "there is already an evaluation split" in prepare(*common, "--holdout", 0.1).error
    # Holding out none of the rest is the default.
    assert prepare(*common, "--holdout", 0).code == 0


def test_splits_may_be_directories_and_a_dataset_may_have_none(run, tmp_path):
    write_rows(tmp_path / "a" / "train" / "x.jsonl", ["one"])
    write_rows(tmp_path / "a" / "valid" / "x.jsonl", ["two"])
    (tmp_path / "a" / "train" / "y.txt").write_text("three\nfour\n")
    data = run(tmp_path / "a")
    assert data.documents("train") == ["one", "three", "four"]
    assert data.documents("eval") == ["two"]


def test_notes_of_fetch_say_what_a_document_is(run, tmp_path):
    directory = tmp_path / "wikitext"
    write_rows(directory / "train.jsonl", ["", *(row for article in ARTICLES for row in article)])
    notes = {"column": "text", "document_start": r"^ = [^=].* = $"}
    (directory / "dataset.json").write_text(json.dumps(notes))
    data = run(directory)
    assert data.documents("train") + data.documents("eval") == ["".join(a) for a in ARTICLES]
    data = run(directory, "--document-per", "line", "--force")
    assert len(data.documents("train") + data.documents("eval")) == 8


def test_a_dataset_may_bring_its_tokenizer(run, words_tokenizer, tmp_path):
    directory = tmp_path / "with"
    write_rows(directory / "train.jsonl", ["w1", "w2 w3"])
    words_tokenizer(9).rename(directory / "tokenizer.json")
    data = run(directory, tokenizer=())
    assert data.tokens("train") == [1, 0]
    assert data.index["tokenizer"]["name"] == "with"


def test_another_column(run, prepare, tmp_path):
    directory = tmp_path / "c"
    directory.mkdir()
    (directory / "train.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert run(directory, "--column", "body").documents("train") == ["one"]
    done = prepare("--output", tmp_path / "x", "--dataset", directory, "--tokenizer", "train:300")
    assert "not a row with a text 'text': choose another column with --column" in done.error


def test_directories_that_are_no_dataset_are_refused(prepare, tmp_path):
    common = ("--output", tmp_path / "x", "--tokenizer", "train:300", "--dataset")
    assert "no such directory" in prepare(*common, tmp_path / "none").error
    (tmp_path / "e").mkdir()
    assert "contains no files of a train split" in prepare(*common, tmp_path / "e").error
    write_rows(tmp_path / "e" / "validation.jsonl", ["x"])
    assert "contains no files of a train split" in prepare(*common, tmp_path / "e").error
    write_rows(tmp_path / "e" / "train.jsonl", ["x"])
    for notes, why in (("{", "Expecting"), ("[" * 100_000, "nested too deeply")):
        (tmp_path / "e" / "dataset.json").write_text(notes)
        error = prepare(*common, tmp_path / "e").error
        assert f"dataset.json: cannot be read ({why}" in error


def test_tables_without_pyarrow_are_refused(prepare, left_beside, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "train.parquet").write_bytes(b"PAR1")
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "pyarrow.py").write_text("raise ModuleNotFoundError(name='pyarrow')\n")
    common = ("--output", tmp_path / "x", "--tokenizer", "train:300", "--dataset", tmp_path / "p")
    done = prepare(*common, PYTHONPATH=f"{missing}{os.pathsep}{REPO}")
    assert "reading .parquet requires pyarrow: run pip install pyarrow" in done.error
    assert left_beside(tmp_path / "x") == []


def test_tables_are_read_as_rows(run, prepare, tmp_path):
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    directory = tmp_path / "tables"
    directory.mkdir()
    rows = [f"row {number} é\n" for number in range(2500)]
    table = pyarrow.table({"text": rows, "n": list(range(len(rows)))})
    parquet.write_table(table, directory / "train-0.parquet", row_group_size=700)
    with pyarrow.ipc.new_stream(str(directory / "validation.arrow"), table.schema) as stream:
        stream.write_table(table.slice(0, 3))
    data = run(directory)
    assert data.documents("train") == rows
    assert data.documents("eval") == rows[:3]
    common = ("--output", tmp_path / "x", "--dataset", directory, "--tokenizer", "train:300")
    assert "no column body" in prepare(*common, "--column", "body").error
    (directory / "train-0.parquet").write_bytes(b"PAR1 and no more")
    assert "train-0.parquet: cannot be read (" in prepare(*common).error
