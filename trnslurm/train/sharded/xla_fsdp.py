"""torch_xla's FSDP, with the settings that the Trainer knows as xla_fsdp_settings."""

import functools
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.fsdp.utils import checkpoint_module
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy

from trnslurm.contract.rundir import STRATEGY
from trnslurm.train.checkpoint.state import Read, TensorShard, num_rows
from trnslurm.train.devices.xla import rate_for, scalar_tensor
from trnslurm.train.errors import TrainError
from trnslurm.train.optim.optimizer import update
from trnslurm.train.optim.xla import CAPTURABLE
from trnslurm.train.sharded.strategy import (
    Sharded,
    ShardingRequest,
    layers_to_wrap,
    own_part,
    spec_of,
    split,
)

# Settings that only TorchAcc's build of torch_xla accepts, and that change no result.
TORCHACC_SETTINGS = {"opt_flatten_overlap"}
# The settings that name a type.
DTYPES = ("compute_dtype", "buffer_dtype")


FsdpPart = tuple[list[str], nn.Parameter]
"""The names of one or more parameters, and this worker's part of them, one after another."""


class XlaFsdp(Sharded):
    """Divides parameters as flat rows of numbers, all of a layer together or each separately."""

    def __init__(self, request: ShardingRequest) -> None:
        super().__init__(request)
        settings = _read_settings(request)
        if settings.get("flatten_parameters") and request.settings.weight_decay:
            raise TrainError(
                "train.weight_decay: with flatten_parameters, norms would decay like matrices: set "
                "it to 0, or strategy.xla_fsdp.xla_fsdp_settings.flatten_parameters=false"
            )
        _patch_llama(request)
        with torch.device("meta"):
            model = request.make_model()
        wrap: Any = XlaFullyShardedDataParallel  # its own annotations are too narrow
        self._wrapped: Any = wrap(
            model,
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls=layers_to_wrap(request)
            ),
            auto_wrapper_callable=_recomputed if request.settings.gradient_checkpointing else None,
            param_init_fn=_allocate,
            **settings,
        )
        self.model = self._wrapped
        self._check_world(self._wrapped.world_size)
        self._parts = list(_parts_of(self._wrapped))
        assert sorted(name for names, _ in self._parts for name in names) == sorted(self._shapes)
        spec = spec_of(request, [(names[0], holder) for names, holder in self._parts])
        self._max_norm = spec.max_norm
        rate = rate_for(self._device, 0.0, self._kinds)
        self._base = spec.make(rate, adam=CAPTURABLE, foreach=False)
        # Made once and zeroed in place: without gradients, the first backward pass would have
        # another graph than the next.
        self._trained = [holder for _, holder in self._parts if holder.requires_grad]
        for holder in self._trained:
            holder.grad = torch.zeros_like(holder)

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        norm: Tensor = self._wrapped.clip_grad_norm_(self._max_norm)
        rate = rate_for(self._device, lr, self._kinds)
        update(self._base, rate)  # xm.optimizer_step would reduce the gradients a second time
        for holder in self._trained:
            assert holder.grad is not None
            holder.grad.zero_()
        return norm

    def shards(self) -> list[TensorShard]:
        """Return this worker's rows, which takes gathering one part of the model after another."""
        shards: list[TensorShard] = []
        for names, holder in self._parts:
            kinds = self.kinds_of(names[0])  # of all, as torch_xla joins no frozen ones with others
            state = self._base.state[holder] if holder.requires_grad else {}
            tensors: Any = [holder.detach(), *(state[kind] for kind in kinds[1:])]
            gathered = xm.all_gather(tensors, pin_layout=False)
            torch_xla.sync()
            shapes = [self._shapes[name] for name in names]
            for kind, flat in zip(kinds, gathered, strict=True):
                for name, whole in zip(names, split(flat.cpu(), shapes), strict=True):
                    shards += self._shard(name, kind, whole)
        return shards

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Transfer every tensor to the device, so that the state exists before the first step.

        The first step then has the graph of any later step, if the state is created in its order.
        """
        for names, holder in self._parts:
            if self._kinds and holder.requires_grad:
                self._base.state[holder]["step"] = scalar_tensor(self._device, updates)
            for kind in self.kinds_of(names[0]):
                whole = (read(name, kind, range(num_rows(self._shapes[name]))) for name in names)
                own = own_part(whole, holder.numel(), self._device.rank).view(holder.shape)
                if kind == "parameter":
                    holder.data.copy_(own)
                else:
                    self._base.state[holder][kind] = self._device.put(own)
        self.shards()  # gathering takes graphs: compiled here, they delay no later save


def _read_settings(request: ShardingRequest) -> dict[str, Any]:
    """Return the settings that torch_xla's class accepts."""
    settings: dict[str, Any] = dict(request.file["xla_fsdp_settings"])
    known = set(inspect.signature(XlaFullyShardedDataParallel.__init__).parameters)
    for key in sorted(settings.keys() - known):
        if key not in TORCHACC_SETTINGS:
            raise TrainError(f"{STRATEGY}: xla_fsdp_settings: torch_xla's FSDP has no {key}")
        del settings[key]
        request.device.say(f"note: {key} has no effect: only TorchAcc's torch_xla has it")
    for key in DTYPES:
        dtype = getattr(torch, str(settings.get(key, "float32")), None)
        if not isinstance(dtype, torch.dtype):
            raise TrainError(f"{STRATEGY}: xla_fsdp_settings.{key} is not a PyTorch type")
        settings[key] = dtype
    return settings


def _patch_llama(request: ShardingRequest) -> None:
    """Let TorchAcc put its kernels into transformers' Llama, if TorchAcc is installed."""
    if importlib.util.find_spec("torchacc") is None:
        return
    import torchacc

    torchacc.utils.patch.patch_llama(True)
    request.device.say("TorchAcc has patched Llama")


def _recomputed(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    wrap: Any = XlaFullyShardedDataParallel
    recompute: Any = checkpoint_module  # not annotated
    wrapped: nn.Module = wrap(recompute(module), *args, **options)
    return wrapped


def _allocate(module: nn.Module) -> None:
    """Allocate a layer while it is being divided; its values are set later."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if parameter.is_meta:
                made = nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad)
                setattr(each, name, made)


def _parts_of(model: nn.Module) -> Iterator[FsdpPart]:
    """Yield each divided parameter with the original names of the parameters in it."""
    for place, module in model.named_modules():
        if not isinstance(module, XlaFullyShardedDataParallel):
            continue
        each: Any = module
        for full, holder in zip(each.full_params, each.sharded_params, strict=True):
            inside = full.metadata()[0] if hasattr(full, "metadata") else [holder._orig_name]
            yield [_plain(f"{place}.{name}") for name in inside], holder


def _plain(name: str) -> str:
    return ".".join(
        part for part in name.split(".") if part not in ("", "_fsdp_wrapped_module", "_fpw_module")
    )
