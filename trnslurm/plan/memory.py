"""The device memory that a worker needs, estimated from its plan before anything starts.

Pure arithmetic on the sizes of a model. Parameters, gradients and optimizer state are counted as
this runtime allocates them (Rajbhandari et al., ZeRO, 2020, arXiv:1910.02054, section 3, has the
same sums). Activations are those that PyTorch's autograd saves, which a test counts. XLA's compiler
fuses and recomputes some of them, so activations on XLA devices follow Korthikanti et al. (Reducing
Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198, equation 2). What a
framework actually allocates depends on its version, on fragmentation and on the operations that it
fuses. Two published results agree. With Llama 3 8B at sequence length 4096 on 8 A100 with 80 GB,
one sample per GPU fits, and two fit only if XLA fuses their operations. With AWS's GPT-2 XL sample
on a NeuronCore with 16 GB, one sample fits with recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from trnslurm.config.schema import Recipe
from trnslurm.devices import DeviceType
from trnslurm.errors import PlanError
from trnslurm.frozen import Frozen
from trnslurm.plan.sharding import group_size
from trnslurm.plan.spec import JobSpec

_GIB = 2**30
_RUNTIME_GIB = 2.5  # the device's context, buffers of collectives, fragmentation
_STATE_BYTES = {"adamw": 8.0, "adam": 8.0, "lamb": 8.0, "sgd": 0.0}
"""Bytes per fp32 parameter, by train.optimizer. A recipe adds its own with optimizer_bytes."""
_MOST_SAMPLES = 4096  # at once that a device could hold, where a smaller micro-batch is looked for


class Memory(Frozen):
    """The peak memory of one worker's device, in GiB."""

    parameters: float
    """The parameters or the worker's shard; on GPUs with autocast, also their 16-bit copies."""
    gradients: float
    optimizer: float
    """The optimizer's state, and fp32 copies of the parameters."""
    gathered: float
    """The layers' parameters and gradients that a sharded model gathers temporarily."""
    activations: float
    """What the forward pass keeps for the backward pass, plus the loss."""
    activations_kept: float
    """The same without recomputation."""
    activations_recomputed: float
    """The same with recomputation: each layer's input, plus one complete layer."""
    available: float
    runtime: float = _RUNTIME_GIB

    @property
    def state(self) -> float:
        """The memory that a worker always holds. Unlike the rest, this is not an estimate."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.runtime

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    def facts(self) -> dict[str, float | bool]:
        """Return all values in GiB, and whether they fit."""
        return {**asdict(self), "total": self.total, "fits": self.fits}


class Shape(Frozen):
    """The sizes of a transformer that determine its memory."""

    family: str
    layers: int
    hidden: int
    keys_and_values: int
    """The width of the keys (and of the values) of all heads together."""
    feed_forward: int
    heads: int
    vocab: int
    layer_parameters: int
    other_parameters: int
    """Parameters outside the layers: embeddings and head."""
    share: bool = False
    """Whether all layers share the same parameters."""

    @property
    def parameters(self) -> int:
        return (1 if self.share else self.layers) * self.layer_parameters + self.other_parameters

    @property
    def key_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.keys_and_values * self.heads // self.hidden

    def held(self, group: int) -> float:
        """Return the number of parameters of one of the workers that divide each layer of a Llama.

        Each worker has a copy of the norms, and of keys and values with fewer heads than workers.
        """
        if group == 1:
            return self.parameters
        norms, keys = 2 * self.hidden, 2 * self.hidden * self.keys_and_values
        rest = (self.layer_parameters - norms - keys) / group
        layer = rest + norms + keys / min(group, self.key_heads)
        return self.layers * layer + (self.other_parameters - self.hidden) / group + self.hidden


def shape_of(model: Mapping[str, Any], *, of_words: bool = False) -> Shape | None:
    """Return the sizes of a model from the keys of its Hugging Face config, or None.

    The head of a token classifier is smaller than that of a text classifier.
    """
    kinds: tuple[tuple[str, Callable[[], Shape]], ...] = (
        ("num_key_value_heads", lambda: _llama(model)),
        ("n_embd", lambda: _gpt2(model)),
        ("hidden_size", lambda: _bert(model, of_words=of_words)),
    )
    for key, make in kinds:
        if key in model:
            try:
                return make()
            except (KeyError, TypeError, ZeroDivisionError):  # the job says what is wrong with it
                return None
    return None


def estimate_memory(spec: JobSpec) -> Memory | None:
    """Return the memory of a worker's device, or None if the model or the device is unknown.

    The memory is also unknown if the recipe does not say what is sharded.
    """
    return _estimate(spec, spec.config.recipe, spec.batch.workers)


def check_memory(spec: JobSpec) -> str:
    """Return a warning if a worker's device is too small, or an empty string otherwise.

    Raise an error if that is certain: if parameters, gradients and optimizer are already too large.
    """
    memory = estimate_memory(spec)
    if memory is None or memory.fits:
        return ""
    has = f"the {memory.available:g} GiB available on {spec.instance.name}"
    advice = " or ".join(_ways_to_fit(spec)) or "devices with more memory"
    if memory.state > memory.available:
        raise PlanError(
            f"{spec.config.title}: the parameters, gradients and optimizer state of a worker need "
            f"{memory.state:.1f} GiB, more than {has}: try {advice}"
        )
    return f"a worker is estimated to need more than {has}: try {advice}"


def larger_micro_batch(spec: JobSpec) -> int | None:
    """Return twice the micro-batch if it divides the batch and half of the device stays free."""
    memory, batch = estimate_memory(spec), spec.batch
    larger = 2 * batch.micro_batch
    free = memory is not None and 2 * memory.total < memory.available
    return larger if free and batch.accumulation % 2 == 0 and not batch.padding else None


def _estimate(spec: JobSpec, recipe: Recipe, workers: int) -> Memory | None:
    of_words = recipe.data.labelled.task == "ner"
    shape, instance = shape_of(recipe.model, of_words=of_words), spec.instance
    divided = _divided(recipe, spec.device)
    if shape is None or not instance.device_gib or divided is None:
        return None
    if _state_bytes(recipe) is None:
        return None
    parameters, gradients, optimizer = _bytes_each(recipe, spec.device, divided, workers)
    group = group_size(recipe, spec.batch.workers_per_node)
    held = shape.held(group)
    tokens = recipe.batch.micro_batch * recipe.seq_len
    layer = tokens * layer_bytes(shape, recipe.seq_len, spec.device, recipe.precision, group)
    # Autocast keeps what flows from layer to layer in fp32.
    flows = shape.hidden * (2 if recipe.precision == "bf16" else 4) / group
    inputs = shape.layers * tokens * flows
    loss = recipe.batch.micro_batch * _loss_bytes(recipe, shape, spec.device, group)
    kept = (shape.layers * layer + loss) / _GIB
    recomputed = (inputs + layer + loss) / _GIB
    recomputes = bool(recipe.train.get("gradient_checkpointing"))
    return Memory(
        parameters=held * parameters / _GIB,
        gradients=held * gradients / _GIB,
        optimizer=shape.parameters * optimizer / _GIB,
        gathered=_gathered_bytes(recipe, shape) / _GIB if _gathers(recipe) else 0.0,
        activations=recomputed if recomputes else kept,
        activations_kept=kept,
        activations_recomputed=recomputed,
        available=instance.device_gib / max(instance.workers),
    )


def _ways_to_fit(spec: JobSpec) -> Iterator[str]:
    """Yield settings that make the job fit: single ones that are enough, or else combinations."""
    recipe, here = spec.config.recipe, spec.batch.nodes
    more = [n for n in (2, 4, 8, 16) if here < n <= (spec.config.cluster.slurm.max_nodes or 16)]
    if not _divided(recipe, spec.device) or not spec.instance.multi_node_workers:
        more = []
    changes = [*_changes(spec, recipe)]
    found = [f"--set {words}" for words, changed in changes if _fits(spec, changed)]
    found += [f"{n} nodes" for n in more if _fits(spec, recipe, n)][:1]
    yield from found
    if found:
        return
    together = [
        (f"--set {first} --set {second}", both)
        for first, changed in changes
        for second, both in _changes(spec, changed)
    ]
    words = ""
    while changes:
        first, recipe = changes[0]
        words = f"{words} --set {first}".strip()
        changes = [*_changes(spec, recipe)]
    for nodes in (here, *more):
        for settings, changed in (*together, (words, recipe)):
            if _fits(spec, changed, nodes):
                yield settings + (f" on {nodes} nodes" if nodes > here else "")
                return


def _fits(spec: JobSpec, recipe: Recipe, nodes: int | None = None) -> bool:
    workers = spec.batch.workers_per_node * (nodes or spec.batch.nodes)
    memory = _estimate(spec, recipe, workers)
    return memory is not None and memory.fits


def _changes(spec: JobSpec, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield settings that need less memory, each with the resulting recipe."""
    batch, train = recipe.batch, recipe.train
    for smaller in range(min(batch.micro_batch - 1, _MOST_SAMPLES), 0, -1):
        changed = replace(recipe, batch=replace(batch, micro_batch=smaller))
        size = batch.per_worker if batch.mode == "per_worker" else batch.global_batch
        if (size or 1) % smaller == 0 and _fits(spec, changed):
            yield f"batch.micro_batch={smaller}", changed
            break
    else:
        if batch.micro_batch > 1:  # not enough by itself
            yield "batch.micro_batch=1", replace(recipe, batch=replace(batch, micro_batch=1))
    if train.get("gradient_checkpointing") is False:
        yield "train.gradient_checkpointing=true", _with(recipe, gradient_checkpointing=True)
    copies = train.get("optimizer_precision", "fp32_copy") == "fp32_copy"
    divides = spec.device.has_zero1
    if train.get("zero1") is False and divides and copies and train.get("optimizer") != "lamb":
        yield "train.zero1=true", _with(recipe, zero1=True)
    asked = train.get("zero1", recipe.zero1)  # it has no fp32_state, also where it divides nothing
    if recipe.precision == "bf16" and "optimizer_precision" in train and copies and not asked:
        words = "train.optimizer_precision=fp32_state"
        yield words, _with(recipe, optimizer_precision="fp32_state")


def _with(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, train={**recipe.train, **settings})


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


def _bert(model: Mapping[str, Any], *, of_words: bool) -> Shape:
    """Return the sizes of BERT with its pretraining heads, or with a classification head.

    RoBERTa and DistilBERT have BERT's pooler as a part of their classifier. ALBERT's embeddings are
    narrower, with a matrix after them, and its layers share their parameters.
    """
    hidden, wide, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    albert = model.get("model_type") == "albert"
    width = model.get("embedding_size") or hidden if albert else hidden
    rows = vocab + model["max_position_embeddings"] + model.get("type_vocab_size", 2)
    embeddings = rows * width + 2 * width + (albert and width * hidden + hidden)
    pooler = 0 if of_words else hidden**2 + hidden
    heads = (hidden**2 + 3 * hidden + vocab) + 2 * (hidden + 1)
    if "num_labels" in model:
        heads = model["num_labels"] * (hidden + 1)
    attention = 4 * (hidden**2 + hidden)
    return Shape(
        family="albert" if albert else "bert",
        share=albert,
        layers=model["num_hidden_layers"],
        hidden=hidden,
        keys_and_values=hidden,
        feed_forward=wide,
        heads=model["num_attention_heads"],
        vocab=vocab,
        layer_parameters=attention + 2 * hidden * wide + wide + hidden + 4 * hidden,
        other_parameters=embeddings + pooler + heads,
    )


def _divided(recipe: Recipe, device: DeviceType) -> bool | None:
    """Check whether workers divide the optimizer's state. None means unknown."""
    asked = recipe.train.get("zero1", recipe.zero1)
    if recipe.strategy.name:
        return True
    return None if asked is None else bool(asked) and device.has_zero1


def _state_bytes(recipe: Recipe) -> float | None:
    """Return the bytes of the optimizer's state per parameter, or None if only the job knows."""
    name = recipe.train.get("optimizer", "adamw")
    return recipe.optimizer_bytes.get(name, _STATE_BYTES.get(name))


def why_no_memory(spec: JobSpec) -> str:
    """Return why there is no estimate, if a line in the recipe would make one possible."""
    recipe = spec.config.recipe
    if estimate_memory(spec) or not spec.instance.device_gib or _state_bytes(recipe) is not None:
        return ""
    name = recipe.train["optimizer"]
    return (
        f"Memory: unknown, because {name} is the job's own optimizer. Set its bytes per parameter "
        f"in recipe.yaml, for example optimizer_bytes: {{{name}: 4}}"
    )


def _bytes_each(
    recipe: Recipe, device: DeviceType, divided: bool, workers: int
) -> tuple[float, float, float]:
    """Return the bytes that a worker holds for each of the model's parameters.

    They are the bytes of the parameter, its gradient and the optimizer state, averaged over shards.
    With tensor parallelism, the first two are per parameter that the worker has.
    """
    moments = _state_bytes(recipe) or 0.0
    if recipe.strategy.name == "tensor":  # in the type computed in, with a copy in fp32
        return _itemsize(recipe), 4, (4 + moments) / workers
    if recipe.strategy.name:  # in fp32, or in 16 bits with a copy in fp32
        return 4 / workers, 4 / workers, moments / workers
    kept = recipe.train.get("optimizer_precision", "fp32_copy")
    # Autocast casts a matrix once in a forward pass, and keeps it for the backward pass.
    casts = 2 if recipe.precision == "mixed" and not device.by_xla else 0
    if divided:  # ZeRO-1 has a copy of its shard, whatever the model has
        own = 2 if recipe.precision == "bf16" else 4
        copy = own if kept == "as_model" else 4
        # torch_xla's adds gradients up in the model's type, ours in fp32.
        sums = 4 if not device.by_xla and own < copy else 0
        return own + casts, own + sums, (4 + moments) * copy / 4 / workers
    if recipe.precision != "bf16":
        return 4 + casts, 4, moments
    if kept == "as_model":
        return 2, 2, moments / 2
    # With copies in fp32, gradients are summed in fp32 too, next to one unit's in 16 bits.
    # fp32_state has its copies during a step only, when there are no activations.
    return 2, 6, moments + (4 if kept == "fp32_copy" else 0)


def _gathers(recipe: Recipe) -> bool:
    return recipe.strategy.name not in ("", "tensor")


def _gathered_bytes(recipe: Recipe, shape: Shape) -> float:
    """Return the bytes gathered at a time: the root, two layers, and one layer's fp32 gradients."""
    parameters = shape.other_parameters + 2 * shape.layer_parameters
    gradients = shape.other_parameters + shape.layer_parameters
    return parameters * _itemsize(recipe) + gradients * 4


def layer_bytes(
    shape: Shape, seq_len: int, device: DeviceType, precision: str, group: int = 1
) -> float:
    """Return the bytes per token that one layer keeps for its backward pass.

    They are multiples of the model's width, of the feed-forward width, and, if the attention
    weights are kept, of heads times sequence length.
    """
    hidden, wide = shape.hidden, shape.feed_forward
    item = 4 if precision == "fp32" else 2
    weights = shape.heads * seq_len if device.keeps_attention_weights else 0
    if shape.family == "llama":
        copies = max(1, group // shape.key_heads)
        attention = 2 * hidden + 2 * shape.keys_and_values * copies
        # A group keeps both inputs of matrices for the whole sequence.
        whole = 2 * hidden if group > 1 else 0
        if device.by_xla:  # both residuals, gate and up; the rest is recomputed
            return item * ((2 * hidden + attention + weights + 2 * wide) / group + whole)
        norms = 2 * 4 * hidden  # in fp32
        kept = item * (4 * hidden - whole + attention + weights + 4 * wide) + norms
        return kept / group + item * whole
    # Inputs of both norms, of the four matrices of the attention, query, key and value: 8. The
    # masks of dropout, 2 + weights, have a byte per element.
    matrices = item * (8 * hidden + 2 * wide + 2 * weights) + 2 * hidden + weights
    if device.by_xla:
        return matrices
    if precision == "mixed":  # autocast keeps inputs of norms in fp32, too
        matrices += 2 * 4 * hidden
    elif shape.family == "gpt2":  # query and key are copies of the projection
        matrices += item * 2 * hidden
    if shape.family == "albert":  # its gelu_new is five operations, not one
        matrices += item * 3 * wide
    return matrices


def _loss_bytes(recipe: Recipe, shape: Shape, device: DeviceType, group: int) -> float:
    """Return the bytes of one sample's embeddings, last norm, logits and loss."""
    if "num_labels" in recipe.model:
        return 0.0
    # Logits in 16 bits; in 32 bits logits, softmax and gradient, most of which XLA fuses.
    logits = (6 if device.by_xla else 14) * shape.vocab
    predicted = recipe.train.get("max_pred", recipe.seq_len)
    return float(predicted * logits / group) + 3 * recipe.seq_len * shape.hidden * _itemsize(recipe)


def _itemsize(recipe: Recipe) -> int:
    return 4 if recipe.precision == "fp32" else 2
