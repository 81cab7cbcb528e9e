"""First parameters from elsewhere: a folder of Hugging Face, one of our checkpoints."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.errors import TrainError
from trnslurm.train.pretrained import load_parameters

SMALL = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}


def make_model(**changes):
    return GPT2LMHeadModel(GPT2Config(**SMALL | changes))


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


def test_a_name_that_is_not_in_the_local_cache(monkeypatch, tmp_path):
    with pytest.raises(TrainError) as error:
        load_parameters(make_model(), "nobody/nothing")

    assert "nobody/nothing is neither a directory with a model nor one in" in str(error.value)
    assert "\n" not in str(error.value)
