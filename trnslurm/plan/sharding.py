"""How a job shards its model: strategy.json, the file that its strategy reads.

A recipe has, for each strategy that its job supports, the contents of that strategy's own file:

    strategy:
      name: deepspeed       # the one to use: deepspeed, fsdp or xla_fsdp; empty for none
      deepspeed: {zero_optimization: {stage: 3}}
      fsdp: {fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}

The named section is rendered as strategy.json next to plan.json, whose train.strategy is its name.
Values that the plan or another key of the recipe decides are added here. The recipe, or the file
named by strategy.deepspeed_file, fsdp_file or xla_fsdp_file, may repeat these values. A different
value is rejected:

    deepspeed   DeepSpeed's config: train_batch_size m*A*W, train_micro_batch_size_per_gpu m,
                gradient_accumulation_steps A, gradient_clipping train.max_norm, bf16 precision
    fsdp        the Trainer's fsdp_config: activation_checkpointing train.gradient_checkpointing
    xla_fsdp    the same with xla true: xla_fsdp_grad_ckpt train.gradient_checkpointing, and in
                xla_fsdp_settings compute_dtype and buffer_dtype according to precision
    tensor      workers: the number of a node's workers that divide each layer

DeepSpeed's config may also contain "auto", as in files for the Hugging Face Trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trnslurm.config.recipes import STRATEGY_FILE
from trnslurm.config.schema import Origin, Recipe, Strategy
from trnslurm.config.tree import flatten, lookup, merge, nest
from trnslurm.contract.plan import BatchPlan
from trnslurm.devices import DEVICES
from trnslurm.errors import ConfigError, did_you_mean

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_LAYERS = "fsdp_transformer_layer_cls_to_wrap"
# DeepSpeed has too many settings to list, and reports wrong ones itself.
_OWN_KEYS = {
    "fsdp": (_LAYERS,),
    "xla_fsdp": (_LAYERS, "xla_fsdp_settings"),
    "tensor": ("workers",),
}
OFFLOADS = {"offload_optimizer", "offload_param"}
_NOT_IN_GROUPS = ("attention_dropout", "attention_bias", "mlp_bias")
_GROUPS_DIVIDE = ("num_attention_heads", "intermediate_size", "vocab_size")
_Decide = Callable[[Recipe, BatchPlan], Any]


def _of_train(key: str, default: Any = None) -> _Decide:
    return lambda recipe, batch: recipe.train.get(key, default)


def _checkpointing(recipe: Recipe, batch: BatchPlan) -> bool:
    return bool(recipe.train.get("gradient_checkpointing", False))


def _dtype(recipe: Recipe, batch: BatchPlan) -> str:
    return _DTYPES[recipe.precision]


def _is_bf16(recipe: Recipe, batch: BatchPlan) -> bool:
    return recipe.precision == "bf16"


# Keys that the plan or the rest of the recipe decides: the key to set instead, and the value.
_DECIDED: dict[str, dict[str, tuple[str, _Decide]]] = {
    "fsdp": {
        "xla": ("strategy.name", lambda recipe, batch: False),
        "activation_checkpointing": ("train.gradient_checkpointing", _checkpointing),
    },
    "xla_fsdp": {
        "xla": ("strategy.name", lambda recipe, batch: True),
        "xla_fsdp_settings.compute_dtype": ("precision", _dtype),
        "xla_fsdp_settings.buffer_dtype": ("precision", _dtype),
        "xla_fsdp_grad_ckpt": ("train.gradient_checkpointing", _checkpointing),
    },
    "deepspeed": {
        "train_batch_size": (  # DeepSpeed counts zero-weight units too
            "batch.global_batch",
            lambda recipe, batch: batch.micro_batch * batch.accumulation * batch.workers,
        ),
        "train_micro_batch_size_per_gpu": (
            "batch.micro_batch",
            lambda recipe, batch: batch.micro_batch,
        ),
        "gradient_accumulation_steps": (
            "batch.global_batch",
            lambda recipe, batch: batch.accumulation,
        ),
        "gradient_clipping": ("train.max_norm", _of_train("max_norm", 0.0)),
        "bf16.enabled": ("precision", _is_bf16),
        "bfloat16.enabled": ("precision", _is_bf16),
        "fp16.enabled": ("precision", lambda recipe, batch: False),
        "amp.enabled": ("precision", lambda recipe, batch: False),
        "optimizer.type": ("train.optimizer", _of_train("optimizer")),
        "optimizer.params.lr": ("train.lr", _of_train("lr")),
        "optimizer.params.betas": (
            "train.beta1",
            lambda recipe, batch: [recipe.train.get("beta1"), recipe.train.get("beta2")],
        ),
        "optimizer.params.eps": ("train.eps", _of_train("eps")),
        "optimizer.params.weight_decay": ("train.weight_decay", _of_train("weight_decay")),
        "scheduler": ("train.schedule", _of_train("schedule")),
    },
    "tensor": {},
}
_ALWAYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
# The sections of DeepSpeed's file that are decided elsewhere as a whole.
_SECTIONS = {key.partition(".")[0] for key in _DECIDED["deepspeed"]}


def usable_devices(recipe: Recipe) -> Sequence[str]:
    """Return the devices that a job supports. An empty result means all devices."""
    able = [d.name for d in DEVICES.values() if recipe.strategy.name in d.strategies]
    return recipe.devices or able


def group_size(recipe: Recipe, workers_per_node: int) -> int:
    """Return the number of workers that divide each layer and share samples."""
    if recipe.strategy.name != "tensor":
        return 1
    size = recipe.strategy.tensor.get("workers")
    for key in _NOT_IN_GROUPS:
        if value := recipe.model.get(key):
            raise ConfigError(
                f"model.{key} is {value!r}, which strategy.name=tensor does not support: set it "
                "to 0, or choose another strategy"
            )
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"strategy.tensor.workers is {size!r}, but it must be a number of at least 1"
        )
    if key := _undivided(recipe, workers_per_node, size):
        able = [
            n for n in range(1, workers_per_node + 1) if not _undivided(recipe, workers_per_node, n)
        ]
        raise ConfigError(
            f"strategy.tensor.workers is {size}, which does not divide {key}: choose "
            f"{' or '.join(map(str, able))}"
        )
    return size


def _undivided(recipe: Recipe, workers_per_node: int, size: int) -> str:
    """Return the sizes that a group of workers cannot divide evenly, with their values."""
    numbers: dict[str, Any] = {
        "the workers of a node": workers_per_node,
        **{f"model.{key}": recipe.model.get(key) for key in _GROUPS_DIVIDE},
        "seq_len": recipe.seq_len,
    }
    keys = recipe.model.get("num_key_value_heads")
    if isinstance(keys, int) and keys % size and size % keys:
        return f"model.num_key_value_heads ({keys}), and is not a multiple of it"
    wrong = [(key, n) for key, n in numbers.items() if isinstance(n, int) and n % size]
    return f"{wrong[0][0]} ({wrong[0][1]})" if wrong else ""


def strategy_file(
    recipe: Recipe, batch: BatchPlan, origins: Mapping[str, Origin] | None = None
) -> dict[str, Any] | None:
    """Return the content of strategy.json, or None for a job without a strategy."""
    name = recipe.strategy.name
    if not name:
        return None
    given: Mapping[str, Any] = getattr(recipe.strategy, name)
    _check(name, given)
    if recipe.precision not in _DTYPES:
        raise ConfigError(
            f"precision {recipe.precision} works only for models that are not sharded: set it to "
            f"bf16, which keeps and updates parameters in fp32 with strategy {name}"
        )
    decided = {key: decide(recipe, batch) for key, (_, decide) in _DECIDED[name].items()}
    _refuse_contradictions(name, given, decided, origins or {})
    if name == "fsdp":
        checkpointing = decided["activation_checkpointing"]
        own = {key: value for key, value in given.items() if key != "xla"}
        return own | {"activation_checkpointing": checkpointing}
    if name == "tensor":
        return dict(given)
    if name == "deepspeed":
        return _deepspeed_file(given, decided)
    file = merge(dict(given), {"xla": True, "xla_fsdp_settings": {}})
    for key, value in decided.items():
        file = merge(file, nest(key, value))
    return file


def is_decided(dotted: str) -> bool:
    """Check whether the plan decides a key of a strategy's section, such as strategy.fsdp.xla."""
    _, _, rest = dotted.partition("strategy.")
    name, _, key = rest.partition(".")
    if name == "deepspeed":
        return key.partition(".")[0] in _SECTIONS
    return key in _DECIDED.get(name, {})


def named_in_plan(recipe: Recipe) -> dict[str, str]:
    """Return the strategy's entry in plan.json's train section, if the recipe has strategies."""
    if "strategy" in recipe.train:
        raise ConfigError("train.strategy is derived from strategy.name: set strategy.name instead")
    return {} if recipe.strategy == Strategy() else {"strategy": recipe.strategy.name}


def _refuse_contradictions(
    name: str,
    given: Mapping[str, Any],
    decided: Mapping[str, Any],
    origins: Mapping[str, Origin],
) -> None:
    """Reject a given key whose value differs from what the plan decides."""
    sections = _SECTIONS if name == "deepspeed" else set()
    off = {key for key in ("fp16", "amp") if lookup(given, f"{key}.enabled") in (False, "auto")}
    for key, value in flatten(given):
        section = key.partition(".")[0]
        found = next((k for k in (key, section) if k in decided), None)
        if found is None and section not in sections:
            continue
        if name == "deepspeed" and (section in off or value == "auto"):
            continue
        dotted = f"strategy.{name}.{key}"
        origin = origins.get(dotted)
        in_file = origin is not None and origin.layer == STRATEGY_FILE
        where = f"{origin.source}: {key}" if origin and in_file else dotted
        if found is None:
            raise ConfigError(f"{where}: trnslurm does not support this: remove it")
        wanted = decided[found]
        alike = value.lower() == wanted if isinstance(value, str) else value == wanted
        if found == "scheduler" or not alike:
            raise ConfigError(
                f"{where} is {json.dumps(value)}, but the plan says {json.dumps(wanted)}: "
                f"remove it, or set {_DECIDED[name][found][0]}"
            )


def _deepspeed_file(given: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's file: the values that the plan decides, and the recipe's own sections."""
    added = {key: value for key, value in decided.items() if key in _ALWAYS}
    added["bf16"] = {"enabled": decided["bf16.enabled"]}
    return added | _without_auto({k: v for k, v in given.items() if k not in _SECTIONS})


def _without_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Remove "auto" values. DeepSpeed itself does not know the word and uses its defaults."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value != "auto"
    }


def _check(name: str, given: Mapping[str, Any]) -> None:
    """Reject keys of a strategy's section that are unknown or decided elsewhere."""
    nested = given.get("xla_fsdp_settings", {}) if name == "xla_fsdp" else {}
    if not isinstance(nested, Mapping):
        raise ConfigError("strategy.xla_fsdp.xla_fsdp_settings must be a mapping")
    if name == "deepspeed":
        _check_zero(given.get("zero_optimization"))
    else:
        layers = given.get(_LAYERS, ["any"])
        if not layers or not isinstance(layers, list) or not all(type(x) is str for x in layers):
            raise ConfigError(
                f"strategy.{name}.{_LAYERS} is {layers!r}: it must be a list of layer classes"
            )
    known = _OWN_KEYS.get(name, tuple(given))
    for key in given:
        if key not in known and key not in _DECIDED[name]:
            hint = did_you_mean(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key strategy.{name}.{key}{hint}")


def _check_zero(zero: Any) -> None:
    """Reject stages that shard only some of the state, and reject offloading."""
    where = "strategy.deepspeed.zero_optimization"
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        raise ConfigError(
            f"{where}.stage must be 3, which also shards parameters and gradients: set "
            f"{where}.stage=3"
        )
    if offloads := sorted(OFFLOADS & zero.keys()):
        raise ConfigError(
            f"{where}.{offloads[0]}: checkpoints need the state on the device: remove this key"
        )
