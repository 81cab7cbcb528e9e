"""First parameters from elsewhere: a folder of Hugging Face, one of our checkpoints."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.checkpoint import Manifest
from trnslurm.train.checkpoint.directory import step_directory
from trnslurm.train.checkpoint.manifest import FORMAT, file_name, write_manifest
from trnslurm.train.checkpoint.tensors import Rows, write_rows
from trnslurm.train.errors import TrainError
from trnslurm.train.pretrained import load_parameters

SMALL = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}


def make_model(**changes):
    return GPT2LMHeadModel(GPT2Config(**SMALL | changes))


def save_checkpoint(root, step, model):
    """Write a model's parameters as a run would."""
    directory = step_directory(root, step)
    directory.mkdir(parents=True)
    rows = [Rows(key=f"parameter/{name}", tensor=p.data) for name, p in model.named_parameters()]
    size, sha256 = write_rows(directory / file_name(0, 1), rows)
    manifest = Manifest(
        format=FORMAT, step=step, samples=8 * step, attempt=1, workers=1, device="cpu", facts={},
        settings={}, kinds=[], files={file_name(0, 1): {"bytes": size, "sha256": sha256}},
        shapes={name: list(p.shape) for name, p in model.named_parameters()},
    )  # fmt: skip
    write_manifest(directory, manifest)


def assert_same(model, other):
    for (name, parameter), (_, expected) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name


def test_a_folder(weird_path):
    saved, model = make_model(), make_model()
    saved.save_pretrained(weird_path)
    load_parameters(model, str(weird_path))

    assert_same(model, saved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_embd": 16}, "transformer.wte.weight has shape [11, 8] instead of [11, 16]"),
        ({"n_layer": 3}, "transformer.h.2.ln_1.weight is missing (and 11 more)"),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path, changes, words):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(TrainError, match="is of another model") as error:
        load_parameters(make_model(**changes), str(tmp_path))

    assert words in str(error.value)


def test_the_newest_whole_of_a_directory_of_checkpoints(tmp_path, capsys):
    root, model = tmp_path / "checkpoints", make_model()
    for step in (2, 10):
        saved = make_model()
        save_checkpoint(root, step, saved)
    load_parameters(model, str(root))
    assert_same(model, saved)
    assert capsys.readouterr().out == f"first parameters: {root}/step-00000010\n"

    (root / "step-00000010/rank-00000-of-00001.safetensors").write_bytes(b"damaged")
    load_parameters(model, str(root))
    assert capsys.readouterr().out == f"first parameters: {root}/step-00000002\n"
    (root / "step-00000002/manifest.json").unlink()
    with pytest.raises(TrainError, match="has no whole checkpoint: step-00000010: rank-00000-of"):
        load_parameters(model, str(root))


def test_a_name_that_is_not_in_the_local_cache(monkeypatch, tmp_path):
    with pytest.raises(TrainError) as error:
        load_parameters(make_model(), "nobody/nothing")

    assert "nobody/nothing is neither a directory with a model nor one in" in str(error.value)
    assert "\n" not in str(error.value)
