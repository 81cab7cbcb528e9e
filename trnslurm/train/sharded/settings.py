"""The settings of a sharded model, and the comparison of the strategy's file with the plan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trnslurm.train.errors import TrainError
from trnslurm.train.plan import JobPlan
from trnslurm.train.settings import CommonSettings

COMPUTE_TYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""The types used for computation. Parameters are kept and updated in fp32."""

# The keys of the Trainer's fsdp_config that each strategy reads.
_FSDP_KEYS = {"fsdp_transformer_layer_cls_to_wrap", "activation_checkpointing"}
_XLA_KEYS = {
    "fsdp_transformer_layer_cls_to_wrap",
    "xla",
    "xla_fsdp_settings",
    "xla_fsdp_grad_ckpt",
}
_KEYS = {"fsdp": _FSDP_KEYS, "xla_fsdp": _XLA_KEYS, "tensor": {"workers"}}
# What moves DeepSpeed's parts to the host or a disk.
OFFLOADS = {"offload_optimizer", "offload_param"}


@dataclass(frozen=True, kw_only=True)
class ShardedSettings(CommonSettings):
    """Base class for the Settings of jobs with sharded models."""

    optimizer: Literal["adamw", "sgd"]
    """AdamW, or plain SGD to compare runs exactly: neither needs norms of whole parameters."""
    strategy: Literal["fsdp", "deepspeed", "xla_fsdp", "tensor"]
    """How the model is sharded: strategy.name of the recipe."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""

    # Added to those of the base class: declared.py reads the source.
    REFUSED = (  # type: ignore[assignment]
        (
            {"strategy": ["fsdp", "deepspeed"], "device": "by XLA"},
            "it works on cpu and cuda, and fsdp on torchneuron: choose another preset, or another "
            "device",
        ),
        (
            {"strategy": "deepspeed", "device": "without deepspeed"},
            "it does not work on torchneuron: set strategy.name to fsdp or tensor",
        ),
        (
            {"strategy": "xla_fsdp", "device": "not by XLA"},
            "it works on neuron, xla-cpu and xla-cuda: choose another preset, or another device",
        ),
        (
            {"strategy": ["deepspeed", "tensor"], "compile": True},
            "only the strategy fsdp supports train.compile: set it to false",
        ),
        (
            {"precision": "mixed"},
            "it works only for models that are not sharded: use fp32, or bf16, which computes in "
            "bf16 and keeps parameters in fp32",
        ),
    )


def read_strategy(path: Path, plan: JobPlan, settings: ShardedSettings) -> dict[str, Any]:
    """Read the file of a run's strategy; raise a TrainError if it contradicts the plan."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise TrainError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise TrainError(f"{path}: expected keys and values")
    for key, wanted in _expected(plan, settings).items():
        found = _value(values, key)
        if found != wanted:
            raise TrainError(
                f"{path}: {key} is {json.dumps(found)}, but the plan says {json.dumps(wanted)}: "
                "render the run again instead of editing one of the two"
            )
    if settings.strategy == "deepspeed":
        for key in OFFLOADS & values["zero_optimization"].keys():
            raise TrainError(
                f"{path}: remove zero_optimization.{key}: checkpoints need the state on the "
                "device, and DeepSpeed needs its own optimizer"
            )
    known = _KEYS.get(settings.strategy)
    for key in values.keys() - (known or values.keys()):
        raise TrainError(f"{path}: unknown key {key}")
    return values


def _value(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _expected(plan: JobPlan, settings: ShardedSettings) -> dict[str, Any]:
    """Return what the plan says about keys of the strategy's file."""
    if settings.strategy == "fsdp":
        return {"activation_checkpointing": settings.gradient_checkpointing}
    if settings.strategy == "tensor":
        return {"workers": plan.workers // plan.batch.groups}
    if settings.strategy == "xla_fsdp":
        return {
            "xla": True,
            "xla_fsdp_grad_ckpt": settings.gradient_checkpointing,
            "xla_fsdp_settings.compute_dtype": COMPUTE_TYPES[plan.precision],
        }
    batch = plan.batch
    return {
        "train_batch_size": batch.micro_batch * batch.accumulation * plan.workers,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": settings.max_norm,
        "bf16.enabled": plan.precision == "bf16",
        "zero_optimization.stage": 3,
        # DeepSpeed must not make its own: the job's optimizer has the rule for what decays, and
        # takes the rate.
        "optimizer": None,
        "scheduler": None,
        "fp16": None,
    }
