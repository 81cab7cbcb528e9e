"""What `trnslurm plan` says of memory, beside the bytes that PyTorch allocates for small models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from trnslurm.config.models import PUBLISHED
from trnslurm.config.schema import Recipe
from trnslurm.devices import CPU, NEURON, XLA_CUDA
from trnslurm.plan import memory
from trnslurm.train.devices.groups import Group
from trnslurm.train.encoders import make_config, new_classifier
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import OptimizerSpec
from trnslurm.train.sharded import tensor as tensor_parallel
from trnslurm.train.sharded.strategy import ShardingRequest
from trnslurm.train.sharded.tensor import TensorParallel

from .conftest import JOBS, lone_device
from .measures import import_job, optimizer_settings

pytestmark = pytest.mark.rest

# GPT-2's gelu_new is one operation in our job, too.
# Where nothing is dropped, PyTorch's attention on the CPU keeps no weights either, as on a GPU.
GPT2 = {
    "vocab_size": 128, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4,
    "activation_function": "gelu_pytorch_tanh", "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}  # fmt: skip
BERT = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 448, "max_position_embeddings": 66, "type_vocab_size": 2, "num_labels": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
RELATIVES = {
    kind: BERT | {key: PUBLISHED[name][1][key] for key in ("model_type", "hidden_act", *more)}
    for kind, name, more in (
        ("roberta", "roberta-base", ("pad_token_id", "type_vocab_size")),
        ("distilbert", "distilbert-base-cased", ("type_vocab_size",)),
        ("albert", "albert-base-v2", ()),
    )
}
LLAMA = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
SAMPLES, TOKENS = 3, 64


def gpt2(sizes: Mapping[str, Any]) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**sizes))


def bert(sizes: Mapping[str, Any]) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**sizes))


def relative(sizes: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = new_classifier(make_config({"embedding_size": 0, **sizes}), of_words=False)
    return model


def llama(sizes: Mapping[str, Any]) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**sizes))


def saved_bytes(model: nn.Module, precision: str) -> int:
    """Count what a forward pass keeps for the backward pass, each memory once, no parameters."""
    model.train()
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Any] = {}  # holds them, so that no memory is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    casts = precision == "mixed"
    arithmetic = torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        with arithmetic:
            logits = model(tokens).logits.float()
        cross_entropy(logits.flatten(0, -2), torch.zeros(logits[..., 0].numel(), dtype=torch.long))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("make", "sizes", "layers", "precision"),
    [
        *[(gpt2, GPT2, "n_layer", name) for name in ("fp32", "bf16", "mixed")],
        *[(bert, BERT, "num_hidden_layers", name) for name in ("fp32", "bf16", "mixed")],
        *[(relative, sizes, "num_hidden_layers", "fp32") for sizes in RELATIVES.values()],
        *[(llama, LLAMA, "num_hidden_layers", name) for name in ("fp32", "bf16")],
    ],
)
def test_activations_are_those_that_autograd_saves(
    make: Callable[..., nn.Module], sizes: dict[str, Any], layers: str, precision: str
) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    saved = [saved_bytes(make({**sizes, layers: n}).to(dtype), precision) for n in (2, 3)]
    shape = memory.shape_of(sizes)
    assert shape is not None
    # The copies that autocast makes of matrices count as parameters.
    casts = 2 * shape.layer_parameters if precision == "mixed" else 0
    layer = (saved[1] - saved[0] - casts) / (SAMPLES * TOKENS)
    dropped = 0 if shape.family == "llama" else 2 * shape.hidden  # masks
    said = memory.layer_bytes(shape, TOKENS, CPU, precision) - dropped
    assert said == pytest.approx(layer, rel=0.08)
    fused = memory.layer_bytes(shape, TOKENS, XLA_CUDA, precision) - dropped
    assert fused < 1.01 * layer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "sizes", "layers"), [(gpt2, GPT2, "n_layer"), (bert, BERT, "num_hidden_layers")]
)
def test_weights_of_the_attention_and_masks(
    make: Callable[..., nn.Module], sizes: dict[str, Any], layers: str, precision: str
) -> None:
    """With dropout PyTorch's CPU keeps them too; its masks are as large as what they mask."""
    dropout = {key: 0.1 for key in sizes if key.endswith(("drop", "dropout_prob"))}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    saved = [
        saved_bytes(
            make({**sizes, **dropout, layers: n, "attn_implementation": "eager"}).to(dtype),
            precision,
        )
        for n in (2, 3)
    ]
    shape = memory.shape_of(sizes)
    assert shape is not None
    item = 4 if precision == "fp32" else 2
    masks = 2 * shape.hidden + shape.heads * TOKENS
    said = memory.layer_bytes(shape, TOKENS, NEURON, precision) + (item - 1) * masks
    assert said == pytest.approx((saved[1] - saved[0]) / (SAMPLES * TOKENS), rel=0.01)


class Worker:
    """As much of a device as an optimizer needs to be made."""

    rank, world = 0, 1


@pytest.mark.parametrize(
    ("precision", "kept"),
    [("fp32", "fp32_copy"), ("bf16", "fp32_copy"), ("bf16", "fp32_state"), ("bf16", "as_model")],
)
def test_state_is_what_a_worker_allocates(precision: str, kept: str) -> None:
    model = gpt2(GPT2).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    named = dict(model.named_parameters())
    spec = OptimizerSpec(
        named=named,
        groups=[{"params": [*named.values()]}],
        kinds=("exp_avg", "exp_avg_sq"),
        cls=torch.optim.AdamW,
        max_norm=1.0,
        precision=kept,
    )
    optimizer = DataParallel(Worker(), spec)  # type: ignore[arg-type]
    optimizer._reduce = lambda: None  # type: ignore[method-assign]
    optimizer.step(0.1)
    tensors: list[Tensor] = [*named.values(), *optimizer._gradients, *optimizer._masters]
    tensors += [each.grad for each in named.values() if each.grad is not None]
    tensors += [v for state in optimizer._base.state.values() for v in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    recipe = Recipe(precision=precision, train={"optimizer_precision": kept, "zero1": False})  # type: ignore[arg-type]
    said = memory._bytes_each(recipe, "cpu", divided=False, workers=1)
    shape = memory.shape_of(GPT2)
    assert shape is not None
    assert sum(storages.values()) == pytest.approx(sum(said) * shape.parameters, rel=0.01)


class Alone(Group):
    """A group whose other workers have this worker's tensors."""

    def _all_reduce(self, tensor, how):
        return tensor * self.size if how == "sum" else tensor.clone()

    def _all_gather(self, tensors, dim):
        return [torch.cat([tensor] * self.size, dim) for tensor in tensors]

    def _reduce_scatter(self, tensors, dim):
        return [(self.size * tensor).chunk(self.size, dim)[0].clone() for tensor in tensors]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("workers", "keys"), [(2, 4), (4, 4), (4, 2)])
def test_activations_of_a_group_are_those_that_autograd_saves(
    make_plan, monkeypatch: pytest.MonkeyPatch, precision: str, workers: int, keys: int
) -> None:
    monkeypatch.setattr(tensor_parallel, "open_group", lambda device, among: Alone(among, 0))
    job = import_job(JOBS / "llama3_clm" / "train.py")
    device = lone_device()
    device.world = device.local_world = workers
    settings: Any = optimizer_settings("sgd")
    settings = SimpleNamespace(**vars(settings), gradient_checkpointing=False)
    plan = replace(make_plan(units=1, workers=1), precision=precision, seq_len=TOKENS)

    def layer_of(sizes: dict[str, Any]) -> tuple[int, int]:
        def make() -> nn.Module:
            return job.make_model(LlamaConfig(**sizes))

        with torch.device("meta"):
            blueprint = make()
        request = ShardingRequest(plan, settings, device, {"workers": workers}, blueprint, make)
        made = TensorParallel(request)
        held = sum(parameter.numel() for parameter in made.model.parameters())
        return saved_bytes(made.model, precision), held

    sizes = LLAMA | {"num_key_value_heads": keys}
    (fewer, _), (more, held) = (layer_of({**sizes, "num_hidden_layers": n}) for n in (2, 3))
    shape = memory.shape_of({**sizes, "num_hidden_layers": 3})
    assert shape is not None and shape.held(workers) == held
    said = memory.layer_bytes(shape, TOKENS, CPU, precision, workers)
    assert said == pytest.approx((more - fewer) / (SAMPLES * TOKENS), rel=0.08)
