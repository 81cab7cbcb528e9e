"""A Llama whose layers are divided over a group of workers: tensor and sequence parallelism.

Between layers, each worker has a slice of the sequence (Korthikanti et al., arXiv:2205.05198,
section 4.2). A norm works on this slice. Then the group gathers the sequence, and each worker
computes with its own attention heads or its own part of the feed-forward layer's width. The results
are summands for the whole sequence: the group adds them up, and each worker keeps its slice.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers.modeling_outputs import CausalLMOutput

from trnslurm.train.devices.groups import Group
from trnslurm.train.errors import TrainError

_SEQUENCE = 1
"""The dimension of the tokens in tensors of batch, tokens and width."""
_BY_ROWS = ("embed_tokens", "lm_head", "q_proj", "gate_proj", "up_proj", "k_proj", "v_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_OF_QUERIES = ("q_proj", "o_proj")
_OF_KEYS = ("k_proj", "v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")


@dataclass(frozen=True)
class Cut:
    """How a group of workers divides a parameter."""

    dim: int
    pieces: tuple[int, ...]
    """The piece of each worker. Some workers have the same piece."""

    @property
    def number(self) -> int:
        """Return how many pieces there are."""
        return max(self.pieces) + 1


def cut_of(name: str, config: Any, workers: int) -> Cut:
    """Return how a group of this many workers divides a parameter of a Llama.

    The distance between workers with the same key head is the number of key heads, as in AWS's
    neuronx-distributed on trn1 (arrange_kv_groups). They have the queries of that head.
    """
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    all_workers = range(workers)
    heads = min(workers, config.num_key_value_heads)
    pieces = tuple(all_workers)
    if layer in _OF_KEYS:
        pieces = tuple(n % heads for n in all_workers)
    if layer in _OF_QUERIES:
        pieces = tuple(n % heads * (workers // heads) + n // heads for n in all_workers)
    if kind == "weight" and layer in _BY_ROWS:
        return Cut(0, pieces)
    if kind == "weight" and layer in _BY_COLUMNS:
        return Cut(1, pieces)
    if kind == "weight" and layer in _NORMS:
        return Cut(0, (0,) * workers)
    raise TrainError(f"strategy.name=tensor does not divide {name}: choose another strategy")


class TensorLlama(nn.Module):
    """transformers' Llama with this worker's pieces of all matrices."""

    def __init__(
        self, llama: Any, group: Group, first: Tensor, recompute: Callable[..., Any] | None
    ) -> None:
        """Make a model with a worker's pieces compute as part of its group.

        `first` is the id of this worker's first token in the vocabulary, on the device. As a
        number, it would make the graph differ from worker to worker.
        """
        super().__init__()
        self._llama = llama
        self._group = group
        self._first = first
        self._recompute = recompute
        self._eager = llama.config._attn_implementation == "eager"
        heads = llama.config.num_attention_heads // group.size
        keys = max(1, llama.config.num_key_value_heads // group.size)
        for layer in llama.model.layers:
            layer.self_attn.num_key_value_groups = heads // keys
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_hook(self._gather)
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.register_forward_hook(self._add_up)
        llama.model.norm.register_forward_hook(self._gather)

    def forward(self, tokens: Tensor, *, use_cache: bool = False) -> CausalLMOutput:
        """Return the logits of this worker's part of the vocabulary, for all tokens."""
        assert not use_cache
        model, length = self._llama.model, tokens.shape[_SEQUENCE]
        hidden = self._embed(tokens)
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        mask = None
        if self._eager:  # other attentions have their own
            least = torch.finfo(hidden.dtype).min
            mask = torch.full(
                (1, 1, length, length), least, dtype=hidden.dtype, device=hidden.device
            )
            mask = mask.triu(1)
        rotary = model.rotary_emb(hidden, positions)
        for layer in model.layers:
            run = functools.partial(layer, attention_mask=mask, position_embeddings=rotary)
            recompute = self._recompute if self.training else None
            hidden = recompute(run, hidden) if recompute else run(hidden)
        logits: Any = linear(model.norm(hidden), self._llama.lm_head.weight)
        return CausalLMOutput(logits=logits)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up this worker's part of the vocabulary; the group adds up the results."""
        weight = self._llama.model.embed_tokens.weight
        rows, inside = _own_places(tokens, self._first, len(weight))
        found = embedding(rows, weight) * inside.unsqueeze(-1).to(weight.dtype)
        return self._add_up(None, None, found)

    def _gather(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        result: Tensor = _GatherSequence.apply(output, self._group)  # type: ignore[no-untyped-call]
        return result

    def _add_up(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        result: Tensor = _AddUpSequence.apply(output, self._group)  # type: ignore[no-untyped-call]
        return result

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this worker's share of the summed loss, which is the same in all of the group."""
        flat, wanted = logits.flatten(0, 1).float(), targets.flatten()
        summed: Tensor = _CrossEntropy.apply(flat, wanted, self._first, self._group)  # type: ignore[no-untyped-call]
        return summed


def _own_places(ids: Tensor, first: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return token ids' positions in a worker's part of the vocabulary, and which are in it."""
    places = ids - first
    inside = (places >= 0) & (places < number)
    return places.clamp(0, number - 1), inside


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather([part], _SEQUENCE)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.reduce_scatter([gradient], _SEQUENCE)[0], None


class _AddUpSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce_scatter([summand], _SEQUENCE)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.all_gather([gradient], _SEQUENCE)[0], None


class _CrossEntropy(torch.autograd.Function):
    """The summed loss of targets (-100 is ignored), with the vocabulary's logits divided."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: Tensor, group: Group) -> Tensor:
        places, inside = _own_places(targets, first, logits.shape[1])
        weights = inside.to(logits.dtype)
        shifted = logits - group.all_reduce(logits.amax(1), "max").unsqueeze(1)
        wanted = shifted.gather(1, places.unsqueeze(1)).squeeze(1) * weights
        powers = shifted.exp()
        total, wanted = group.all_reduce(torch.stack([powers.sum(1), wanted])).unbind()
        counts = (targets >= 0).to(logits.dtype)
        ctx.save_for_backward(powers, total, places, weights, counts)
        return ((total.log() - wanted) * counts).sum() / group.size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Every worker's share of the loss depends on these logits, and has this same gradient:
        # together they are the whole loss, so that nothing is divided here.
        powers, total, places, weights, counts = ctx.saved_tensors
        slopes = powers / total.unsqueeze(1)
        slopes = slopes.scatter_add(1, places.unsqueeze(1), -weights.unsqueeze(1))
        return slopes * (counts * gradient).unsqueeze(1), None, None, None
