"""BERT's relatives: published configurations, first parameters, and what goes into each."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AutoModelForMaskedLM,
    BertConfig,
    BertForPreTraining,
    DistilBertConfig,
    RobertaConfig,
)

from trnslurm.config.models import PUBLISHED
from trnslurm.plan.memory import shape_of
from trnslurm.train.classifier import classifier_flops, make_classifier, predict
from trnslurm.train.data.labelled import LabelledSamples
from trnslurm.train.encoders import make_config, new_classifier, positions
from trnslurm.train.errors import TrainError

from .conftest import lone_device

SIZES = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 34, "num_labels": 3,
}  # fmt: skip
TYPES = {
    "bert": PUBLISHED["bert-base-cased"][1], "roberta": PUBLISHED["roberta-base"][1],
    "distilbert": PUBLISHED["distilbert-base-cased"][1],
    "albert": PUBLISHED["albert-base-v2"][1] | {"embedding_size": 16},
}  # fmt: skip
DEVICE = lone_device()


def values(kind, **changes):
    return TYPES[kind] | SIZES | {"name": ""} | changes


def plan(kind, **changes):
    return SimpleNamespace(model=values(kind, **changes), seed=1, precision="fp32")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("bert-base-uncased", BertConfig()), ("distilbert-base-uncased", DistilBertConfig()),
        ("albert-xxlarge-v2", AlbertConfig()),  # as transformers' own documentation has it
        (
            "roberta-base",
            RobertaConfig(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
        ),
    ],
)  # fmt: skip
def test_published_models_are_the_defaults_of_transformers(name, default):
    assert make_config(PUBLISHED[name][1]).to_dict() == default.to_dict()


@pytest.mark.parametrize("of_words", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_plan_counts_their_parameters(kind, of_words):
    model = new_classifier(make_config(values(kind)), of_words)
    shape = shape_of(values(kind), of_words=of_words)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    # Six for each parameter of a layer and token, also of layers that share theirs.
    more = classifier_flops(
        new_classifier(make_config(values(kind, num_hidden_layers=5)), of_words), 8
    )
    attention = 12 * 3 * 32 * 8
    assert more - classifier_flops(model, 8) == 8 * (6 * 3 * shape.layer_parameters + attention)


def published(kind, folder):
    """Write a folder as the Hub has it: the model with the heads of its pretraining."""
    config = make_config(values(kind))
    if kind == "bert":
        model = BertForPreTraining(config)
    else:
        model = AlbertForPreTraining(config) if kind == "albert" else None
    model = model or AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("of_words", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_published_weights_get_a_new_head(tmp_path, capsys, kind, of_words):
    saved = published(kind, tmp_path)
    capsys.readouterr()
    model = make_classifier(plan(kind), str(tmp_path), DEVICE, of_words=of_words)
    there = dict(saved.base_model.named_parameters())
    for name, parameter in model.base_model.named_parameters():
        if not (kind == "roberta" and "pooler" in name):
            assert torch.equal(parameter, there[name]), name
    said = capsys.readouterr().out
    assert "new: " in said and "classifier." in said and "left out: " in said
    again = make_classifier(plan(kind), str(tmp_path), DEVICE, of_words=of_words)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", TYPES)
def test_a_text_that_is_filled_up_is_told_as_it_is(kind):
    """RoBERTa's positions count from padding's, DistilBERT has no segments."""
    model = make_classifier(plan(kind), "", DEVICE).eval()
    pad = TYPES[kind]["pad_token_id"]
    ids = torch.full((1, 32), pad)
    ids[0, :7] = torch.tensor([5, 17, 80, 17, 33, 4, 6])
    samples = LabelledSamples(
        input_ids=ids, attention_mask=(ids != pad).long(), token_type_ids=torch.zeros_like(ids),
        labels=torch.zeros(1),
    )  # fmt: skip
    assert positions(values(kind)) == (32 if kind == "roberta" else 34)
    found = predict(model, DEVICE, "fp32", samples)
    assert found.tolist() == [pytest.approx(model(ids[:, :7]).logits[0].tolist(), abs=1e-6)]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("bert", {}, "has the type roberta, but the recipe's model has bert: choose another"),
        ("roberta", {"layer_norm_eps": 1e-12}, "has layer_norm_eps 1e-05 in config.json, "),
        ("roberta", {"num_attention_heads": 4}, "has num_attention_heads 2 in config.json"),
        (
            "roberta",
            {"hidden_size": 16},
            "does not match the model: roberta.embeddings.word_embeddi",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, kind, changes, words):
    published("roberta", tmp_path)
    with pytest.raises(TrainError, match=words) as error:
        make_classifier(plan(kind, **changes), str(tmp_path), DEVICE)
    assert "\n" not in str(error.value)


def test_an_old_config_that_says_no_type_is_taken(tmp_path):
    published("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_classifier(plan("bert"), str(tmp_path), DEVICE)


def test_only_albert_has_embeddings_of_their_own_width():
    with pytest.raises(
        TrainError, match="embedding_size is 8: only ALBERT models have this key: set it"
    ):
        make_config(values("roberta", embedding_size=8))
