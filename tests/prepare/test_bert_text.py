"""Where sentences end, and what is text in WikiExtractor's files."""

import json

import numpy as np
import pytest

from trnslurm.prepare import wordpiece
from trnslurm.prepare.bert import sentences


@pytest.mark.parametrize(
    "text",
    [
        "It rains.| It pours!| Does it?| It does…| Good",
        "Mr. Smith met Dr. J. R. Doe of the U.S. Senate on Jan. 5.| He left.",
        "See No. 5 there, e.g. this one, cf. That.| No.| Then p. 12 again.",
        'He said "No."| Then he left.| (It was late.)| "Why?" asked Ann.| "I do."',
        "It costs 3.50 dollars. or does it? not said",
        "So am I.| And on it goes... and on...| Then it ends.",
        "他来了。|我走了。|“真的？”|好",
        "A heading|\nIts text.| More of it|\n\nThe next",
        "???| Hm.| ",
    ],
)
def test_where_sentences_end(text):
    expected = [part.strip() for part in text.split("|") if part.strip()]
    assert list(sentences.split(text.replace("|", ""), wrapped=False)) == expected


def test_lines_that_are_but_wrapped():
    text = "It rains and\nit pours. It\ndoes.\n\nA heading\n \nThe next"
    assert list(sentences.split(text, wrapped=True)) == [
        "It rains and\nit pours.",
        "It\ndoes.",
        "A heading",
        "The next",
    ]


def test_wikiextractors_articles_without_their_markup_and_titles(prepare, tmp_path):
    directory = tmp_path / "extracted"
    for name, titles in (("AA/wiki_00", ("Alpha", "Beta")), ("AB/wiki_00", ("Gamma", "Delta"))):
        path = directory / name
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(
                f'<doc id="1" url="https://x?curid=1" title="{title}">\n{title}\n\n'
                f"The {title.lower()}s grow. They glow.\n\n</doc>\n\n"
                for title in titles
            )
        )
    output = tmp_path / "data"
    source = ("--wikiextractor", directory, "--tokenizer", "train:200")
    done = prepare("bert", "--output", output, *source, "--seq-len", 32)
    assert done.code == 0, done
    index = json.loads((output / "index.json").read_text())
    names = ["extracted/AA/wiki_00", "extracted/AB/wiki_00"]
    assert [source["name"] for source in index["sources"]] == names
    assert index["splits"]["train"]["documents"] == 4
    vocabulary = json.loads((output / "tokenizer.json").read_text())["model"]["vocab"]
    # Only the text was read when the tokenizer was trained: it has no number and no title.
    characters = {name for name in vocabulary if len(name) == 1}
    assert characters == set("The alphas grow. They glow. betas gammas deltas".lower()) - {" "}
    # Named as text it is recognised, and is not mixed with other text.
    asked = ("bert", "--output", output, "--seq-len", 32, "--tokenizer", "train:200", "--text")
    assert "nothing to do" in prepare(*asked, directory).out
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert prepare(*asked, directory, tmp_path / "a.txt").error == (
        f"--text or --input {tmp_path}/a.txt is not WikiExtractor output, but {directory} is: "
        "prepare them separately"
    )


def test_a_directory_of_text(prepare, tmp_path):
    directory = tmp_path / "texts"
    for name in ("b.txt", "a/1.jsonl", "a/notes.md", ".hidden/c.txt"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "Of rows."}\n' if path.suffix == ".jsonl" else "One.\n\n" * 4)
    output = tmp_path / "data"
    done = prepare(
        "bert", "--output", output, "--text", directory, "--tokenizer", "train:200", "--seq-len", 8,
        "--max-pred", 2, "--shards", 1, "--test-shards", 1,
    )  # fmt: skip
    assert done.code == 0, done
    index = json.loads((output / "index.json").read_text())
    assert [source["name"] for source in index["sources"]] == ["texts/a/1.jsonl", "texts/b.txt"]
    # Two documents for the test shard, though five have none to spare.
    documents = {name: split["documents"] for name, split in index["splits"].items()}
    assert documents == {"train": 3, "eval": 2}


def test_the_training_split_of_a_dataset(prepare, tmp_path):
    directory = tmp_path / "set"
    directory.mkdir()
    (directory / "dataset.json").write_text('{"column": "body"}')
    row = '{"body": "It is one.\\n\\nAnd it is short."}\n'
    (directory / "train.jsonl").write_text(row * 3)
    (directory / "validation.jsonl").write_text(row)
    output = tmp_path / "data"
    done = prepare("bert", "--output", output, "--dataset", directory, "--tokenizer", "train:200")
    assert done.code == 0, done
    index = json.loads((output / "index.json").read_text())
    assert [source["name"] for source in index["sources"]] == ["train.jsonl"]
    assert index["splits"]["train"]["documents"] == 3


def test_words_met_before_make_the_same_tokens(prepare, text, tmp_path):
    output = tmp_path / "data"
    assert prepare("bert", "--output", output, "--text", text, "--tokenizer", "train:600").code == 0
    pieces = wordpiece.load(output / "tokenizer.json")
    odd = (
        "A\u00a0b\x1cc\td\r\n e\u3000f [MASK] don't_do ##e 中文x e\u0301 \u0301 İ ΑΣ \u200b"
        + "q" * 200
    )
    texts = [odd, *text.read_text().split("\n\n"), "", " \n ", odd[::-1], odd.upper()]
    # As the library does it, which remembers nothing; the second time from memory.
    plain = pieces.tokenizer.encode_batch(texts, add_special_tokens=False)
    for _ in range(2):
        tokens = [np.frombuffer(text, wordpiece.TOKEN).tolist() for text in pieces.encode(texts)]
        assert tokens == [encoding.ids for encoding in plain]
    assert pieces.known
