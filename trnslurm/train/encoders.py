"""BERT and its relatives RoBERTa, DistilBERT and ALBERT, built from the keys of a recipe.

The section `model` uses BERT's names for all of them; `model_type` says which model it is.
"""

from typing import Any

from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    RobertaConfig,
)

from trnslurm.train.errors import TrainError

TYPES: dict[str, Any] = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "distilbert": DistilBertConfig,
    "albert": AlbertConfig,
}
# DistilBERT's names; transformers translates only the first three.
_DISTILBERT = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def make_config(values: dict[str, Any], **more: Any) -> Any:
    """Build the transformers config of a recipe's model."""
    # `name` is the published model with these values, and no key of the config.
    values = {key: value for key, value in values.items() if key != "name"}
    kind, width = values.pop("model_type", "bert"), values.pop("embedding_size", 0)
    if width and kind != "albert":
        raise TrainError(
            f"model.embedding_size is {width}: only ALBERT models have this key: set it to 0"
        )
    if kind == "albert":
        values["embedding_size"] = width or values["hidden_size"]
    if kind == "distilbert":
        unknown = ("type_vocab_size", "layer_norm_eps")  # its eps is BERT's
        values = {_DISTILBERT.get(k, k): v for k, v in values.items() if k not in unknown}
    return TYPES[kind](**values, **more)


def new_classifier(config: Any, of_words: bool) -> Any:
    """Build a classifier of texts, or of the words in them."""
    auto: Any = AutoModelForTokenClassification if of_words else AutoModelForSequenceClassification
    return auto.from_config(config, attn_implementation=config._attn_implementation)


def positions(model: dict[str, Any]) -> int:
    """Return how many tokens a text can have."""
    # RoBERTa's positions count from the one after padding's.
    spared = model["pad_token_id"] + 1 if model.get("model_type") == "roberta" else 0
    return int(model["max_position_embeddings"]) - spared
