"""Rows with labels to samples: what is read, framed and held out, and what training then reads."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from trnslurm.prepare.labelled.samples import hold_out
from trnslurm.train.data.labelled import open_labelled
from trnslurm.train.errors import TrainError

TWEETS = (
    'text,labels,id\n"a good day, my friend",2,1\n"he said \\"so so\\"",1,2\n'
    '"a ""bad"" one\nby far",0,3\n'
    "plain,2,4\n\nwith \\, comma,0,5\n"
)
PAIRS = [
    {"sentence1": f"one {'more ' * n}", "sentence2": f"two {'less ' * (9 - n)}", "label": n % 2}
    for n in range(10)
]


@pytest.fixture
def run(prepare, tmp_path):
    """Prepare, and return the directory with its index."""

    def start(*arguments):
        done = prepare("labelled", "--output", tmp_path / "data", "--processes", 1, *arguments)
        assert done.code == 0, done
        return tmp_path / "data", json.loads((tmp_path / "data/index.json").read_text()), done

    return start


@pytest.fixture
def tweets(tmp_path):
    path = tmp_path / "tweets.csv"
    path.write_text(TWEETS)
    return path


@pytest.fixture(scope="session")
def cased(tmp_path_factory):
    """A Hugging Face folder with a tokenizer that keeps upper case."""
    folder = tmp_path_factory.mktemp("cased")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "more", "less", "One"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    return folder


def opened(directory, split, index, seed=7):
    shape = {"seq_len": index["seq_len"], "vocab_size": index["vocab_size"]}
    return open_labelled(directory, split, **shape, seed=seed)


def texts(directory, samples):
    tokenizer = BertTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return tokenizer.batch_decode(samples.input_ids, skip_special_tokens=True)


def test_a_csv_with_quotes_and_escapes(run, tweets):
    common = ("--text", tweets, "--label-column", "labels", "--tokenizer", "train:100")
    directory, index, done = run(*common, "--seq-len", 32, "--holdout", 0)
    assert done.out.endswith("train 5 samples (0 2, 1 1, 2 2), vocabulary 78\n")
    assert (index["labels"], index["metrics"]) == (["0", "1", "2"], ["accuracy", "macro_f1"])
    assert index["left_out"] == []
    samples = opened(directory, "train", index).fixed(0, 5)
    found = [text.replace(" ", "") for text in texts(directory, samples)]
    assert found == ["agoodday,myfriend", 'hesaid"soso"', 'a"bad"onebyfar', "plain", "with,comma"]
    assert samples.labels.tolist() == [2, 1, 0, 2, 0]
    assert run(*common, "--seq-len", 32, "--holdout", 0)[2].out.count("nothing to do") == 1


def test_bad_rows_are_counted_and_named(run, tweets):
    rows = ["x,1", ",1,9", "x,,9", '"a "b" c",1,9', "x,nan,9", "x,1,9,9", '"  ",0,9', *["x,1"] * 6]
    tweets.write_text(TWEETS + "\n".join(rows) + "\n")
    common = ("--text", tweets, "--label-column", "labels", "--tokenizer", "train:100")
    _, index, done = run(*common, "--holdout", 0)
    assert index["splits"]["train"]["samples"] == 5
    assert {(part["reason"], part["rows"]) for part in index["left_out"]} == {
        ("a different number of fields than the first line", 8),
        ("no text", 2),
        ("no label", 2),
        ("a quote within a quoted field", 1),
    }
    named = [line for line in done.err.splitlines() if line.startswith("warning")]
    assert named == [
        "warning: tweets.csv: left out 8 rows with a different number of fields than the first "
        "line: lines 9, 14, 16, 17, 18, …",
        "warning: tweets.csv: left out 2 rows with no text: lines 10, 15",
        "warning: tweets.csv: left out 2 rows with no label: lines 11, 13",
        "warning: tweets.csv: left out 1 row with a quote within a quoted field: line 12",
    ]


def test_what_a_quote_or_a_backslash_too_many_joins_is_named_line_by_line(run, tweets):
    rows = ["good,1", '"bad,0', "fine,0", '"a day",1', "ends with \\", "so,0", "yes,1"]
    tweets.write_text("text,label\n" + "\n".join(rows))
    _, index, done = run("--text", tweets, "--tokenizer", "train:100", "--holdout", 0, "--label",
        "no", "--label", "yes")  # fmt: skip
    assert index["splits"]["train"]["labels"] == {"no": 0, "yes": 2}
    assert [line for line in done.err.splitlines() if line.startswith("warning")] == [
        "warning: tweets.csv: left out 3 rows with a quote within a quoted field: lines 3, 4, 5",
        "warning: tweets.csv: left out 2 rows with a backslash at the end of the line outside "
        "quotes: lines 6, 7",
        "warning: no sample has the label no",
    ]


def test_numbers_and_nothing_in_the_place_of_text(run, cased, tmp_path):
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(("one", "two", 3, None, " "))]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    common = ("--tokenizer", cased, "--holdout", 0)
    _, index, _ = run("--text", tmp_path / "rows.json", *common)
    reasons = {part["reason"]: part["first_rows"] for part in index["left_out"]}
    assert reasons == {"a value that is not text": [3], "no text": [4, 5]}


def write_pairs(path):
    pyarrow = importlib.import_module("pyarrow")
    table = pyarrow.table({key: [row[key] for row in PAIRS] for key in PAIRS[0]})
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    elif path.suffix == ".arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(PAIRS))
    else:
        rows = ["\t".join(map(str, row.values())) for row in PAIRS]
        path.write_text("\n".join(["\t".join(PAIRS[0]), *rows]))


def test_pairs_are_framed_and_cut_as_berts_tokenizer_does_whatever_the_format(run, cased, tmp_path):
    expected = BertTokenizerFast.from_pretrained(str(cased))(
        [row["sentence1"] for row in PAIRS], [row["sentence2"] for row in PAIRS],
        max_length=11, padding="max_length", truncation="longest_first", return_tensors="pt",
    )  # fmt: skip
    for suffix in (".tsv", ".json", ".jsonl", ".parquet", ".arrow"):
        write_pairs(tmp_path / f"pairs{suffix}")
        directory, index, _ = run(
            "--text", tmp_path / f"pairs{suffix}", "--task", "mrpc", "--tokenizer", cased,
            "--seq-len", 11, "--holdout", 0, "--force",
        )  # fmt: skip
        samples = opened(directory, "train", index).fixed(0, 10)
        for name in ("input_ids", "token_type_ids", "attention_mask"):
            assert torch.equal(getattr(samples, name), expected[name]), (suffix, name)
        assert samples.labels.tolist() == [n % 2 for n in range(10)]
    assert index["labels"] == ["not_equivalent", "equivalent"]
    assert (index["metrics"], index["cut"]) == (["accuracy", "f1"], 10)


def test_mnlis_dataset_has_two_splits_for_evaluation(run, cased, tmp_path):
    (tmp_path / "mnli").mkdir()
    names = ("train", "validation_matched", "validation_mismatched", "test_mismatched")
    for number, name in enumerate(names):
        rows = [{"premise": "one", "hypothesis": "two", "label": n % 3} for n in range(3 + number)]
        lines = [json.dumps(row) for row in rows]
        (tmp_path / f"mnli/{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "mnli/dataset.json").write_text('{"column": null}')
    _, index, _ = run("--dataset", tmp_path / "mnli", "--task", "mnli", "--tokenizer", cased)
    samples = {name: split["samples"] for name, split in index["splits"].items()}
    assert samples == {"train": 3, "eval": 4, "eval_mismatched": 5}
    assert index["splits"]["eval"]["labels"] == {
        "entailment": 2, "neutral": 1, "contradiction": 1
    }  # fmt: skip


def test_labels_on_a_scale_are_numbers(run, cased, tmp_path):
    rows = [{"sentence1": "one", "sentence2": "two", "label": n / 4} for n in range(20)]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ("--text", tmp_path / "s.jsonl", "--task", "stsb", "--tokenizer", cased)
    directory, index, _ = run(*common, "--holdout", 0.25)
    held_out = opened(directory, "eval", index)
    assert (held_out.num_outputs, held_out.metrics) == (1, ("pearson", "spearman"))
    assert held_out.fixed(0, 5).labels.tolist() == [0.75, 1.75, 2.75, 3.75, 4.75]
    assert held_out.fixed(0, 1).labels.dtype == torch.float32


@pytest.mark.parametrize(
    ("found", "asked", "names", "numbers"),
    [
        (["pos", "neg", "pos"], [], ["neg", "pos"], [1, 0, 1]),
        (["pos", "neg", "pos"], ["pos", "neu", "neg"], ["pos", "neu", "neg"], [0, 2, 0]),
        ([2, 0, 1], ["neg", "neu", "pos"], ["neg", "neu", "pos"], [2, 0, 1]),
        ([2.0, 0.0, 1.0], [], ["0", "1", "2"], [2, 0, 1]),
    ],
)
def test_names_of_labels(run, cased, tmp_path, found, asked, names, numbers):
    rows = [{"text": "one", "label": label} for label in found]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    options = [word for name in asked for word in ("--label", name)]
    common = ("--text", tmp_path / "rows.json", "--tokenizer", cased, "--holdout", 0)
    directory, index, _ = run(*common, *options)
    assert index["labels"] == names
    assert opened(directory, "train", index).fixed(0, 3).labels.tolist() == numbers


def test_the_same_samples_whatever_the_pieces_and_processes(prepare, tweets, tmp_path):
    tweets.write_text(TWEETS + "".join(f"word {n % 7} again,{n % 3},1\n" for n in range(300)))
    common = ("--text", tweets, "--label-column", "labels", "--tokenizer", "train:100")
    for name, more in (("a", ()), ("b", ("--chunk-bytes", 999, "--processes", 2))):
        assert prepare("labelled", "--output", tmp_path / name, *common, *more).code == 0
    files = [path.name for path in (tmp_path / "a").iterdir()]
    assert sorted(files) == ["eval.npy", "index.json", "tokenizer.json", "train.npy"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert prepare("verify", tmp_path / "a").out.endswith("complete, matches its index\n")
    (tmp_path / "a/eval.npy").write_bytes(b"x")
    assert "eval.npy is damaged" in prepare("verify", tmp_path / "a").error


def test_a_share_of_each_label_is_held_out():
    labels = np.array([0] * 90 + [1] * 10 + [0, 1] * 50)
    chosen = hold_out(labels, 0.1)
    assert [np.count_nonzero(chosen & (labels == label)) for label in (0, 1)] == [14, 6]
    assert np.flatnonzero(chosen)[0] < 15 and np.flatnonzero(chosen)[-1] > 190


def test_the_stream_goes_round_in_another_order_each_epoch(run, tweets):
    tweets.write_text("text,label\n" + "".join(f"word{n},{n % 2}\n" for n in range(10)))
    common = ("--text", tweets, "--tokenizer", "train:100", "--holdout", 0.2)
    directory, index, _ = run(*common)
    split = opened(directory, "train", index)
    first, second = (texts(directory, split.samples(n * 8, 8)) for n in range(2))
    assert set(first) == set(second) == set(texts(directory, split.fixed(0, 8)))
    assert first != second
    assert texts(directory, split.samples(3, 8)) == first[3:] + second[:3]
    assert texts(directory, split.fixed(7, 2)) == texts(directory, split.fixed(15, 1)) + texts(
        directory, split.fixed(0, 1)
    )
    assert opened(directory, "train", index, seed=8).fingerprint == split.fingerprint
    assert opened(directory, "eval", index).fingerprint != split.fingerprint


def test_what_training_refuses(run, tweets, tmp_path):
    common = ("--text", tweets, "--label-column", "labels", "--tokenizer", "train:100")
    directory, index, _ = run(*common, "--holdout", 0, "--seq-len", 16)

    def refused(path=directory, split="train", seq_len=16, vocab_size=100):
        with pytest.raises(TrainError) as error:
            open_labelled(path, split, seq_len=seq_len, vocab_size=vocab_size, seed=1)
        return str(error.value)

    assert "add rows to evaluate on, use --holdout, or set train.eval_every=0" in refused(
        split="eval"
    )
    assert "seq_len is 32, but" in refused(seq_len=32)
    assert "model.vocab_size is 50, but" in refused(vocab_size=50)
    assert "no prepared data (index.json is missing)" in refused(path=tmp_path)
    (directory / "train.npy").write_bytes((directory / "train.npy").read_bytes() + b"x")
    assert "train.npy: does not match its index" in refused()
    (directory / "train.npy").write_bytes(b"")
    assert "train.npy: " in refused()
    (directory / "index.json").write_text(json.dumps(index | {"kind": "bert_pretrain"}))
    assert "its data is of kind bert_pretrain, not labelled" in refused()
    leading_out = index["splits"]["train"] | {"file": "../train.npy"}
    (directory / "index.json").write_text(json.dumps(index | {"splits": {"train": leading_out}}))
    assert "is not the name of a file in the index's directory" in refused()
    assert Path(directory).is_dir()
