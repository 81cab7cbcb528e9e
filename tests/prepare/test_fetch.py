"""Fetching from the Hub, with stand-ins for its two libraries."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"
SECRET = "hf_abcdefghijklmnop"
WIKITEXT = ("--dataset", "wikitext", "--config", "wikitext-103-raw-v1", "--tokenizer", "gpt2")


@pytest.fixture
def calls(tmp_path):
    return tmp_path / "calls"


@pytest.fixture
def fetch(prepare, words_tokenizer, calls, tmp_path, monkeypatch):
    """Run fetch with the stand-ins."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("STAND_IN_CALLS", str(calls))
    monkeypatch.setenv("STAND_IN_TOKENIZER", str(words_tokenizer(50)))
    for name in ("datasets", "huggingface_hub"):
        spec = importlib.util.spec_from_file_location(name, STAND_INS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, name, module)

    def run(*arguments):
        return prepare("fetch", "--output", tmp_path / "set", *arguments)

    return run


def test_what_is_fetched_can_be_prepared(fetch, prepare, read_data, left_beside, calls, tmp_path):
    done = fetch(*WIKITEXT)
    assert done.code == 0, done
    directory = tmp_path / "set"
    assert done.out == f"Fetched {directory}: train 6 rows, validation 2,501 rows, test 1 rows\n"
    assert left_beside(directory) == []
    lines = (directory / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [
        "", " = A = \n", "", " Text of A é \n", " = B = \n", " Text of B \n"
    ]  # fmt: skip
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert calls.read_text() == '["wikitext", "wikitext-103-raw-v1", null]\n'
    done = prepare("--output", tmp_path / "data", "--dataset", directory)
    assert done.code == 0, done
    data = read_data(tmp_path / "data")
    # The rows of an article are one document.
    assert data.index["splits"]["train"]["documents"] == 2
    assert data.index["splits"]["eval"]["documents"] == 1
    assert data.index["made"]["documents"]["start"] == r"^ = [^=].* = $"


def test_the_same_again_asks_nobody(fetch, calls):
    fetch(*WIKITEXT)
    calls.unlink()
    done = fetch(*WIKITEXT)
    assert done.code == 0
    assert "is already fetched; there is nothing to do" in done.out
    assert not calls.exists()


def test_another_wish_is_refused_unless_forced(fetch, calls, tmp_path):
    fetch(*WIKITEXT)
    assert "choose another name, or replace it" in fetch(*WIKITEXT, "--revision", "v2").error
    assert fetch(*WIKITEXT, "--revision", "v2", "--force").code == 0
    notes = json.loads((tmp_path / "set" / "dataset.json").read_text())
    assert notes["revision"] == "v2"
    (tmp_path / "set" / "dataset.json").unlink()
    # No other directory is replaced, not even by force.
    assert "exists and was not fetched: choose another name" in fetch(*WIKITEXT, "--force").error
    assert (tmp_path / "set" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (WIKITEXT, {"STAND_IN_NETWORK": "no"}, "ConnectionError: Couldn't reach the Hub with ***"),
        (("--dataset", "wikitxt"), {}, "wikitxt: could not be fetched from the Hub (File"),
        ((*WIKITEXT, "--tokenizer", "gtp2"), {}, "tokenizer gtp2: could not be fetched from the"),
        ((*WIKITEXT, "--column", "body"), {}, "there is no column body, only text, n: choose"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(
    fetch, left_beside, tmp_path, monkeypatch, arguments, environ, words
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    error = fetch(*arguments).error
    assert words in error
    assert SECRET not in error
    assert not (tmp_path / "set").exists()
    assert left_beside(tmp_path / "set") == []


def test_without_the_library_it_says_which(fetch, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if there were none
    error = fetch(*WIKITEXT).error
    assert error.startswith(
        f"fetch requires the Python package datasets: run {sys.executable} -m pip install"
    )


@pytest.fixture
def fetch_model(fetch, prepare, tmp_path):
    """Run model with the stand-ins."""
    return lambda *arguments: prepare("model", "--output", tmp_path / "model", *arguments)


def test_a_models_weights_come_without_pickles(fetch_model, left_beside, tmp_path):
    done = fetch_model("--model", "some/bert")
    assert done.code == 0, done
    folder = tmp_path / "model"
    assert done.out == f"Fetched {folder}: 0 MB\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert left_beside(folder) == []
    assert "is already fetched; there is nothing to do" in fetch_model("--model", "some/bert").out
    other = ("--model", "some/bert", "--revision", "v2")
    assert fetch_model(*other).error.endswith(
        "another model or revision: choose another name, or replace it with --force"
    )
    assert fetch_model(*other, "--force").code == 0
    assert "v2" in (folder / "model.safetensors").read_text()
    (folder / "model.json").unlink()
    assert "exists and was not fetched" in fetch_model(*other, "--force").error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("some/brt", "model some/brt: could not be fetched from the Hub (FileNotFoundError"),
        (
            "old/bert",
            "model old/bert: has no weights in safetensors, the only supported format: ",
        ),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(fetch_model, left_beside, tmp_path, name, words):
    assert words in fetch_model("--model", name).error
    assert not (tmp_path / "model").exists()
    assert left_beside(tmp_path / "model") == []
