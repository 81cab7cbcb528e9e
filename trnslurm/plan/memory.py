"""The device memory that a training needs, estimated from its plan before anything starts.

Pure arithmetic on the sizes of a model. What a framework really allocates depends on its version,
on fragmentation and on the operations it fuses. The numbers below agree with one published table:
Llama 3 8B at sequence length 4096 on 8 A100 with 80 GB, where one sample per GPU fits, and two do
only if XLA fuses their operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trnslurm.config import Recipe
from trnslurm.plan.spec import JobSpec

_GIB = 2**30
_RUNTIME_GIB = 2.5  # the device's context, buffers of collectives, fragmentation
_XLA = ("neuron", "xla-cuda", "xla-cpu")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak memory of one worker's device, in GiB."""

    state: float
    """Parameters, gradients and optimizer state, or the worker's shard of them."""
    gathered: float
    """Layers' parameters and gradients that a sharded model gathers for a moment."""
    activations: float
    """What the forward pass keeps for the backward pass, and the loss."""
    available: float
    runtime: float = _RUNTIME_GIB

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.runtime

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    def facts(self) -> dict[str, float | bool]:
        """Return all values, in GiB, and whether they fit."""
        return {**asdict(self), "total": self.total, "fits": self.fits}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer that decide its memory."""

    family: str
    layers: int
    hidden: int
    keys_and_values: int
    """Width of the keys (and of the values) of all heads together."""
    feed_forward: int
    heads: int
    vocab: int
    layer_parameters: int
    other_parameters: int
    """Parameters outside the layers: embeddings and head."""

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.other_parameters


def shape_of(model: Mapping[str, Any]) -> Shape | None:
    """Return the sizes of a model from the keys of its Hugging Face config, or None."""
    for key, make in (("num_key_value_heads", _llama), ("n_embd", _gpt2), ("hidden_size", _bert)):
        if key in model:
            try:
                return make(model)
            except KeyError:
                return None
    return None


def estimate_memory(spec: JobSpec) -> Memory | None:
    """Return the memory of a worker's device, or None if the model or the device is unknown.

    It is unknown too if the recipe does not say what is sharded.
    """
    recipe, instance = spec.config.recipe, spec.instance
    shape = shape_of(recipe.model)
    sharded = bool(recipe.strategy.name)
    if shape is None or not instance.device_gib or not (sharded or "zero1" in recipe.train):
        return None
    state = shape.parameters * _parameter_bytes(recipe, spec.device, spec.batch.workers)
    activations = spec.batch.micro_batch * _sample_bytes(recipe, shape, spec.device)
    return Memory(
        state=state / _GIB,
        gathered=_gathered_bytes(recipe, shape) / _GIB if sharded else 0.0,
        activations=activations / _GIB,
        available=instance.device_gib / max(instance.workers),
    )


def _llama(model: Mapping[str, Any]) -> Shape:
    hidden, wide = model["hidden_size"], model["intermediate_size"]
    heads = model["num_attention_heads"]
    narrow = hidden // heads * model["num_key_value_heads"]
    embeddings = 1 if model.get("tie_word_embeddings") else 2
    return Shape(
        family="llama",
        layers=model["num_hidden_layers"],
        hidden=hidden,
        keys_and_values=narrow,
        feed_forward=wide,
        heads=heads,
        vocab=model["vocab_size"],
        layer_parameters=2 * hidden * (hidden + narrow) + 3 * hidden * wide + 2 * hidden,
        other_parameters=embeddings * model["vocab_size"] * hidden + hidden,
    )


def _gpt2(model: Mapping[str, Any]) -> Shape:
    hidden = model["n_embd"]
    return Shape(
        family="gpt2",
        layers=model["n_layer"],
        hidden=hidden,
        keys_and_values=hidden,
        feed_forward=4 * hidden,
        heads=model["n_head"],
        vocab=model["vocab_size"],
        layer_parameters=12 * hidden**2 + 13 * hidden,
        other_parameters=(model["vocab_size"] + model["n_positions"]) * hidden + 2 * hidden,
    )


def _bert(model: Mapping[str, Any]) -> Shape:
    """Return the sizes of BERT with its pretraining heads."""
    hidden, wide, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    embeddings = (vocab + model["max_position_embeddings"] + 2) * hidden + 2 * hidden
    heads = (hidden**2 + 3 * hidden + vocab) + 2 * (hidden + 1)
    attention = 4 * (hidden**2 + hidden)
    return Shape(
        family="bert",
        layers=model["num_hidden_layers"],
        hidden=hidden,
        keys_and_values=hidden,
        feed_forward=wide,
        heads=model["num_attention_heads"],
        vocab=vocab,
        layer_parameters=attention + 2 * hidden * wide + wide + hidden + 4 * hidden,
        other_parameters=embeddings + (hidden**2 + hidden) + heads,
    )


def _parameter_bytes(recipe: Recipe, device: str, workers: int) -> float:
    """Return the bytes that a worker holds per parameter of the model, averaged over shards."""
    moments = 0 if recipe.train.get("optimizer") == "sgd" else 8
    if recipe.strategy.name:  # in fp32, or in 16 bits with a copy in fp32
        return (8 + moments) / workers
    model, optimizer = 8, moments
    if recipe.precision == "bf16":
        kept = recipe.train.get("optimizer_precision", "fp32_copy")
        # With a copy in fp32, gradients are accumulated in fp32 too.
        model = 8 if kept == "fp32_copy" else 4
        optimizer = {"fp32_copy": moments + 4, "as_model": moments // 2}.get(kept, moments)
    divided = recipe.train["zero1"] and device in _XLA
    return model + optimizer / (workers if divided else 1)


def _gathered_bytes(recipe: Recipe, shape: Shape) -> float:
    """Return what is gathered at once: the root, two layers, and one layer's gradients in fp32."""
    parameters = shape.other_parameters + 2 * shape.layer_parameters
    gradients = shape.other_parameters + shape.layer_parameters
    return parameters * _itemsize(recipe) + gradients * 4


def _sample_bytes(recipe: Recipe, shape: Shape, device: str) -> float:
    """Return the bytes of one sample's activations and loss."""
    tokens = recipe.seq_len
    layer = tokens * _token_bytes(shape, tokens, device) * _itemsize(recipe) / 2
    layers = shape.layers * layer
    if recipe.train.get("gradient_checkpointing"):  # each layer's input and one whole layer
        layers = shape.layers * tokens * shape.hidden * _itemsize(recipe) + layer
    # Logits in 16 bits; in 32 bits logits, softmax and gradient, most of which XLA fuses.
    logits = (6 if device in _XLA else 14) * shape.vocab
    predicted = recipe.train.get("max_pred", tokens) if shape.family == "bert" else tokens
    return layers + predicted * logits


def _token_bytes(shape: Shape, tokens: int, device: str) -> float:
    """Return the bytes that one layer keeps per token, at 16 bits."""
    hidden, wide = shape.hidden, shape.feed_forward
    # Flash attention keeps no weights; XLA's own keeps them for every head and pair of tokens.
    weights = shape.heads * tokens if device in ("neuron", "xla-cpu") else 0
    if shape.family != "llama":  # Korthikanti et al., 2022, with dropout
        return 34 * hidden + 5 * weights
    attention = 4 * hidden + 4 * shape.keys_and_values + 2 * weights
    if device in _XLA:  # both residuals, gate and up; the rest is recomputed
        return 4 * hidden + attention + 4 * wide
    return 16 * hidden + attention + 8 * wide  # norms in fp32, and every operation's result


def _itemsize(recipe: Recipe) -> int:
    return 4 if recipe.precision == "fp32" else 2
