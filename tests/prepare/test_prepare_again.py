"""Running again on data that is finished, on other input, on damage."""

import fcntl
import json
import shutil

from trnslurm.prepare.files import partial


def test_the_same_again_is_nothing_to_do(prepare, text, tmp_path, stable):
    output = tmp_path / "data"
    command = ("--output", output, "--text", text, "--tokenizer", "train:300")
    prepare(*command)
    before = {path: path.stat().st_mtime_ns for path in [output, *output.iterdir()]}
    # How the work is done does not change the data.
    done = prepare(*command, "--processes", 1, "--chunk-bytes", 3000)
    assert done.code == 0
    assert "already prepared from this input; there is nothing to do: train 29,789" in done.out
    assert {path: path.stat().st_mtime_ns for path in [output, *output.iterdir()]} == before
    again = prepare(*command, "--json")
    facts = json.loads(again.out)
    assert not facts["made"]
    stable.json("data prepare", facts, free=["index"])


def test_other_input_is_refused_and_named_unless_forced(
    prepare, read_data, left_beside, words_tokenizer, text, tmp_path
):
    output = tmp_path / "data"
    common = ("--output", output, "--text", text)
    prepare(*common, "--tokenizer", "train:300")
    before = read_data(output).files()
    other = tmp_path / "other.txt"
    other.write_text("w1\n\nw2\n")
    for arguments, words in (
        ([*common, "--tokenizer", "train:301"], "tokenizer was train:300, now train:301"),
        ([*common, "--tokenizer", words_tokenizer(9)], "tokenizer was train:300, now "),
        ([*common, "--tokenizer", "train:300", "--holdout", 0.1], "holdout was 0.005, now 0.1"),
        ([*common, "--tokenizer", "train:300", "--document-per", "line"], 'documents was {"per":'),
        ([*common, other, "--tokenizer", "train:300"], "(other.txt is new)"),
        (["--output", output, "--text", other, "--tokenizer", "train:300"], "text.txt is gone"),
    ):
        error = prepare(*arguments).error
        assert error.startswith(f"{output} was prepared from other input ("), error
        assert words in error and error.endswith("or replace it with --force"), error
    assert read_data(output).files() == before
    forced = ("--output", output, "--text", other, "--tokenizer", words_tokenizer(9), "--force")
    assert prepare(*forced).code == 0
    assert read_data(output).tokens("train") == [1, 0]
    assert left_beside(output) == []


def test_what_was_replaced_and_cannot_be_removed_is_named(prepare, monkeypatch, tmp_path):
    path, output = tmp_path / "a.txt", tmp_path / "data"
    path.write_text("one\n\ntwo\n")
    command = ("--output", output, "--text", path, "--tokenizer", "train:300", "--json")
    assert "warning" not in prepare(*command, "--force").err
    assert "warning" not in prepare(*command, "--force").err
    remove = shutil.rmtree

    def rmtree(directory, **options):
        if ".replaced-" not in directory.name:  # as one that its owner may not write to
            remove(directory, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    done = prepare(*command, "--force")
    (old,) = tmp_path.glob(".data.replaced-*")
    assert done.code == 0
    warning = f"warning: {old} was replaced but could not be removed: remove it by hand"
    assert done.err.splitlines()[-1] == warning


def test_a_changed_file_is_other_input(prepare, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    command = ("--output", tmp_path / "data", "--text", path, "--tokenizer", "train:300")
    prepare(*command)
    path.write_text("one\n\ntwO\n")
    assert "(a.txt has changed)" in prepare(*command).error


def test_damaged_data_is_found_and_made_again(prepare, text, tmp_path):
    output = tmp_path / "data"
    command = ("--output", output, "--text", text, "--tokenizer", "train:300")
    prepare(*command)
    assert prepare("verify", output).out == f"{output}: complete, matches its index\n"
    content = bytearray((output / "train.bin").read_bytes())
    content[100] ^= 1
    (output / "train.bin").write_bytes(content)
    for done in (prepare("verify", output), prepare(*command)):
        assert done.error == f"{output}: train.bin is damaged: prepare it again with --force"
    assert prepare(*command, "--force").code == 0
    assert prepare("verify", output).code == 0


def test_a_directory_of_something_else_is_never_replaced(prepare, text, tmp_path):
    (tmp_path / "precious").write_text("x")
    done = prepare("--output", tmp_path, "--text", text, "--tokenizer", "train:300", "--force")
    assert done.error == f"{tmp_path} already exists and is not prepared data: choose another name"
    assert (tmp_path / "precious").read_text() == "x"
    (tmp_path / "index.json").write_text("[" * 100_000)
    again = prepare("--output", tmp_path, "--text", text, "--tokenizer", "train:300")
    assert again.error == done.error


def test_a_file_system_without_locks_will_do(monkeypatch, tmp_path):
    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial(tmp_path / "data", "key") as directory:
        assert directory.is_dir()
    assert not directory.exists()
