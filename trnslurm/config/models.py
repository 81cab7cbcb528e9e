"""Published BERT-like models: `model.name` sets a recipe's model sizes, weights and tokenizer.

The figures come from each model's config.json on the Hugging Face Hub
(https://huggingface.co/NAME/raw/main/config.json), under BERT's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trnslurm.config.tree import Layer
from trnslurm.errors import ConfigError, did_you_mean

_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "embedding_size": 0,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1.0e-12,
    "pad_token_id": 0,
}
_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_CASED = {"vocab_size": 28996}
# Positions start at pad_token_id + 1, so 512 of the 514 are for tokens.
_ROBERTA = _BERT | {
    "model_type": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1.0e-5,
    "pad_token_id": 1,
}
_DISTILBERT = _BERT | {"model_type": "distilbert", "num_hidden_layers": 6, "type_vocab_size": 0}
_ALBERT = _BERT | {
    "model_type": "albert",
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("google-bert", _BERT),
    "bert-base-cased": ("google-bert", _BERT | _CASED),
    "bert-base-multilingual-cased": ("google-bert", _BERT | {"vocab_size": 119547}),
    "bert-large-uncased": ("google-bert", _BERT | _LARGE),
    "bert-large-cased": ("google-bert", _BERT | _LARGE | _CASED),
    "roberta-base": ("FacebookAI", _ROBERTA),
    "roberta-large": ("FacebookAI", _ROBERTA | _LARGE),
    "distilroberta-base": ("distilbert", _ROBERTA | {"num_hidden_layers": 6}),
    "distilbert-base-uncased": ("distilbert", _DISTILBERT),
    "distilbert-base-cased": ("distilbert", _DISTILBERT | _CASED),
    "albert-base-v2": ("albert", _ALBERT),
    "albert-large-v2": ("albert", _ALBERT | _LARGE),
    "albert-xlarge-v2": (
        "albert",
        _ALBERT | _LARGE | {"hidden_size": 2048, "intermediate_size": 8192},
    ),
    "albert-xxlarge-v2": (
        "albert",
        _ALBERT | {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384},
    ),
}
"""Name -> the model's owner on the Hub, and the values in its config.json."""


# A recipe without these keys uses `name` for something else.
_NEEDED = {"vocab_size", "hidden_size", "num_attention_heads", "type_vocab_size"}


def published_layer(tree: Mapping[str, Any]) -> list[Layer]:
    """Return the layer of values that `model.name` selects; empty if the recipe has no such key."""
    model, data = tree["model"], tree["data"]
    name = model.get("name")
    if not name or not model.keys() >= _NEEDED:
        return []
    if name not in PUBLISHED:
        hint = did_you_mean(name, PUBLISHED) or f"; known are {', '.join(PUBLISHED)}"
        raise ConfigError(f"model.name is {name!r}, which is not a known published model{hint}")
    owner, values = PUBLISHED[name]
    if "model_type" not in model and values["model_type"] != "bert":
        berts = [name for name, (_, one) in PUBLISHED.items() if one["model_type"] == "bert"]
        raise ConfigError(
            f"model.name is {name}, a {values['model_type']} model: this recipe trains "
            f"{', '.join(berts)}"
        )
    own: dict[str, Any] = {"model": {k: v for k, v in values.items() if k in model}, "data": {}}
    if data["model"]:  # the parameters are not initialized at random
        own["data"]["model"] = f"{owner}/{name}"
    if data["format"] == "labelled" and is_on_hub(data["tokenizer"]):
        own["data"]["tokenizer"] = f"{owner}/{name}"
        own["data"]["path"] = f"{data['path']}-{name}"  # another tokenizer makes other tokens
    return [Layer(name="published model", source=f"model.name {name}", tree=own)]


def is_on_hub(tokenizer: str | None) -> bool:
    """Check whether a recipe's `data.tokenizer` names a model on the Hub rather than a file."""
    here = ("train:", ".", "/", "~")
    name = tokenizer or "."
    return not name.startswith(here) and not name.endswith(".json")
