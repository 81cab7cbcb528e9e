"""PyTorch's own fully sharded data parallelism (FSDP2), on cpu, cuda and torchneuron."""

import functools
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trnslurm.train.checkpoint.state import Read, TensorShard, own_rows
from trnslurm.train.optim.optimizer import update
from trnslurm.train.sharded.strategy import Sharded, ShardingRequest, layers_to_wrap, spec_of


class Fsdp(Sharded):
    """Divides each parameter by rows, as checkpoints do."""

    def __init__(self, request: ShardingRequest) -> None:
        super().__init__(request)
        device = request.device
        with torch.device("meta"):
            model: Any = request.make_model()
        if request.settings.gradient_checkpointing:
            # Not the older, reentrant way, which FSDP2's hooks do not support.
            model._set_gradient_checkpointing(
                gradient_checkpointing_func=functools.partial(
                    torch.utils.checkpoint.checkpoint, use_reentrant=False
                )
            )
        # Before they are sharded: the gathering of a layer's parameters stays outside of its graph.
        device.compile_layers(model)
        _move_buffers(model, device.torch_device)
        mesh = init_device_mesh(device.torch_device.type, (device.world,))
        # Sums over workers in fp32: in fewer bits they would depend on how many there are.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if request.plan.precision == "bf16" else torch.float32,
            reduce_dtype=torch.float32,
        )
        layers = layers_to_wrap(request)
        for module in [each for each in model.modules() if type(each) in layers]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        _allocate(model, device.torch_device)
        self.model = model
        # Kept here: after a forward pass without a backward pass the model has whole parameters.
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        # The fused AdamW reads memory once, the plain one for each of its operations.
        spec = spec_of(request, self._parameters.items())
        self._max_norm = spec.max_norm
        self._base = spec.make(0.0, adam={"fused": True})

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._max_norm)
        update(self._base, lr)
        self._base.zero_grad(set_to_none=True)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def shards(self) -> list[TensorShard]:
        """Return this worker's rows, which its memory has in the saved layout."""
        return [
            TensorShard(name, kind, rows, tensor)
            for name, parameter in self._parameters.items()
            if (rows := self._own_rows(name))
            for kind, tensor in self._tensors(name, parameter).items()
        ]

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Fill parameters in place, and create the state that the first step would create."""
        for name, parameter in self._parameters.items():
            if self._kinds and name not in self._frozen:
                state = self._base.state[parameter]
                for kind in self._kinds:
                    state[kind] = torch.zeros_like(parameter)
                # The fused AdamW expects the step on the parameter's device.
                state["step"] = torch.tensor(float(updates), device=self._device.torch_device)
            for kind, tensor in self._tensors(name, parameter).items():
                tensor.copy_(read(name, kind, self._own_rows(name)))

    def _own_rows(self, name: str) -> range:
        return own_rows(self._shapes[name], self._device.rank, self._device.world)

    def _tensors(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return this worker's part of a parameter and of its optimizer state."""
        parts: dict[str, Any] = {"parameter": parameter.detach()}
        if name not in self._frozen:
            state = self._base.state[parameter]
            parts |= {kind: state[kind] for kind in self._kinds}
        return {kind: part.to_local() for kind, part in parts.items()}


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put buffers with values on the device.

    fully_shard would assign to their `data` (PyTorch 2.13), which does not work on PrivateUse1.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))


@torch.no_grad()
def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate this worker's part of a meta model's parameters; its buffers keep their values."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.to_empty(device=device)
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
