"""Labelled data that cannot be made: one line says where, what and what to do; nothing is left."""

import json

import pytest

KIND = ("labelled", "--tokenizer", "train:100")
ROWS = "text,label\ngood,1\nbad,0\n"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "\n", "line 1: there is no column text, only none: choose with --text-column"),
        ("a.csv", '"text"x,label\n', "line 1: not valid column names: a quote within a quoted"),
        ("a.csv", "body,label\nx,1\n", "there is no column text, only body, label: choose with"),
        ("a.csv", "text,class\nx,1\n", "there is no column label, only text, class: choose with"),
        ("a.csv", "text,text,label\nx,y,1\n", "line 1: two columns are named text: rename"),
        ("a.csv", 'text,label\nx,1\n"y,0\nz,1\n', "line 3: the row that starts here does not end"),
        ("a.csv", "text,label\n,1\nx,\n", "no row has both a text and a label, so there are"),
        ("a.csv", "text,label\nx,1\ny,1\n", "all rows have the same label, '1'"),
        ("a.csv", "text,label\nx,1\ny,3\nz,0\n", "there is a label '3', but no label 2: fix it"),
        ("a.csv", "text,label\nx,0\ny,-1\n", "line 3: label '-1': whole-number labels must be"),
        ("a.json", "{}", "is not a list of rows: for one row per line, use a .jsonl"),
        ("a.json", '[{"text": "x"}]', "row 1: there is no column label, only text: choose with"),
        ("a.json", "[", "not valid JSON ("),
        ("a.json", '[{"text": "x", "label": [1]}]', "row 1: label [1] is neither a name nor a n"),
        ("a.jsonl", '{"text": "x", "label": 1}\n[]\n', "line 2: not a row: expected {'text': …,"),
        ("a.jsonl", '{"text": "x", "label": 1}\n\n{\n', "line 3: not valid JSON ("),
        ("a.json", "[" * 100_000, "a.json: not valid JSON (nested too deeply)"),
        ("a.jsonl", '{"a":' * 100_000, "line 1: not valid JSON (nested too deeply)"),
        ("a.xml", "<a/>", "the suffix of a file of rows must be one of .csv, .tsv"),
        ("a.parquet", "PAR1", "cannot be read ("),
    ],
)
def test_files_that_cannot_be_read(refused, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    error = refused("--text", tmp_path / name)
    assert words in error and (name in error or "same label" in error)


def test_a_file_that_is_not_utf8(refused, rows):
    rows.write_bytes(b"text,label\nx,1\nsch\xf6n,0\n")
    error = refused("--text", rows)
    assert error.startswith(f"{rows}: not UTF-8 at byte 18, on line 3: convert it first")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "mrcp"), "--task mrcp: must be a GLUE task (cola, sst2, mrpc, stsb"),
        (("--task", "mrpc"), "line 1: there is no column sentence1, only text, label: choose"),
        (("--label", "no", "--label", "no"), "--label: no, no contains a label twice"),
        (
            ("--task", "mrpc", "--label", "a", "--label", "b", "--label", "c"),
            "--label or the recipe's data.labelled.labels gives 3 names (a, b, c), but --task "
            "mrpc has 2 labels: give the same number, or omit the labels or the task",
        ),
        (
            ("--task", "stsb", "--label", "a", "--label", "b"),
            "2 names (a, b), but --task stsb has numbers and no labels: give the",
        ),
        (("--label", "0", "--label", "2"), "label '1' is not one of 0, 2: fix it, or name all"),
        (("--label", "no"), "--label no is the only label given: list all labels"),
        (
            ("--label", "no", "--label", "yes", "--text-column", "label", "--label-column", "text"),
            "line 2: label 'good' is no",
        ),
        (
            ("--text-column", "a", "--text-column", "b", "--text-column", "c"),
            "names 3 columns: use one for a text, or",
        ),
        (
            ("--text-column", "text", "--text-column", "label"),
            "--text-column label is also the label column, which would reveal the label: choose",
        ),
        (("--label-column", "text"), "--text-column text is also the label column, which would"),
        (("--seq-len", 7), "--seq-len 7: must be 8 or more"),
        (("--holdout", 1), "--holdout 1.0: must be 0 or more and less than 1"),
        (("--holdout", 0.1), "too few rows (2) to hold out a share of 0.1:"),
        (("--tokenizer", "train:99"), "V must be a whole number of 100 or more"),
        (("--tokenizer", "/none"), "--tokenizer /none: no such file or directory"),
    ],
)
def test_values_that_cannot_be(refused, rows, arguments, words):
    assert words in refused("--text", rows, *arguments)


def test_labels_out_of_range(refused, rows):
    rows.write_text(ROWS + "fine,2\n")
    error = refused("--text", rows, "--label", "bad", "--label", "good")
    assert error == (
        f"{rows}: line 4: label '2' is not one of bad, good, nor a number from 0 to 1: fix it, "
        "or name all "
        "labels with --label"
    )
    rows.write_text("text,label\n" + "".join(f"x,l{n}\n" for n in range(1001)))
    assert "line 1002: there are more than 1000 different labels: choose the label" in refused(
        "--text", rows
    )
    path = rows.with_suffix(".json")
    for wrong in ("high", 5.5, -1):
        pairs = [{"sentence1": "x", "sentence2": "y", "label": label} for label in (1.5, wrong)]
        path.write_text(json.dumps(pairs))
        error = refused("--text", path, "--task", "stsb")
        assert error == f"{path}: row 2: label '{wrong}' is not a number from 0 to 5: fix it"


def test_rows_for_evaluation_leave_no_holdout(refused, rows):
    error = refused("--text", rows, "--eval", rows, "--holdout", 0.5)
    assert error == (
        "--holdout 0.5: there is already an evaluation split. Remove --holdout, or the recipe's "
        "data.holdout"
    )


def test_rows_of_another_split_are_not_trained_on(refused, rows):
    (rows.parent / "set").mkdir()
    for name in ("train", "validation"):
        (rows.parent / f"set/{name}.csv").write_text(ROWS)
    error = refused("--text", rows.parent / "set")
    assert error == (
        f"--text or --input {rows.parent}/set: validation.csv looks like part of the eval "
        "split: name the files to train on, and pass those to evaluate on with --eval"
    )
    (rows.parent / "empty").mkdir()
    error = refused("--text", rows, "--eval", rows.parent / "empty")
    assert error.startswith(f"--eval {rows.parent}/empty: this directory contains no text")
