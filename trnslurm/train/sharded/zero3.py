"""DeepSpeed's ZeRO-3, on cpu with gloo and on cuda with NCCL."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.checkpoint.state import Read, TensorShard, num_rows
from trnslurm.train.errors import TrainError
from trnslurm.train.sharded.strategy import Sharded, ShardingRequest, own_part, spec_of


class Zero3(Sharded):
    """Divides each parameter as a flat row of numbers, with DeepSpeed's engine.

    Keys of its file that the plan does not have are read only by DeepSpeed. The engine's loss
    scaling does not exist in fp32 and bf16. Its averages over units and workers are undone in the
    loss.
    """

    def __init__(self, request: ShardingRequest) -> None:
        super().__init__(request)
        self._deepspeed = _open_deepspeed(request.device.torch_device.type)
        # Each layer is divided as soon as it is made, so the whole model never exists.
        config = request.file | {"zero_allow_untested_optimizer": True}  # SGD; our tests do
        with self._deepspeed.zero.Init(config_dict_or_path=config):
            model: Any = request.make_model()
        if request.settings.gradient_checkpointing:
            model._set_gradient_checkpointing(gradient_checkpointing_func=request.device.checkpoint)
        base = spec_of(request, model.named_parameters()).make(0.0, adam={"fused": True})
        self._engine, *_ = self._deepspeed.initialize(model=model, optimizer=base, config=config)
        self._check_world(self._engine.dp_world_size)
        self.model = self._engine
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._base = self._engine.optimizer.optimizer
        self._units = request.plan.batch.accumulation
        self._done = 0

    def backward(self, loss: Tensor) -> None:
        """Add a unit's gradient; with the last unit, DeepSpeed ends the accumulation."""
        self._done += 1
        self._engine.set_gradient_accumulation_boundary(self._done == self._units)
        # The engine does not accept a vector, even of one element.
        self._engine.backward(loss.sum() * self._device.world, scale_wrt_gas=False)

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        assert self._done == self._units
        self._done = 0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()  # it frees the gradients
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def shards(self) -> list[TensorShard]:
        """Return this worker's rows; each tensor is gathered for a moment."""
        fragments = self._deepspeed.utils
        shards: list[TensorShard] = []
        for name, parameter in self._parameters.items():
            for kind in self.kinds_of(name):
                if name in self._frozen:  # DeepSpeed has no copy in fp32
                    with self._deepspeed.zero.GatheredParameters([parameter]):
                        whole = parameter.detach().clone()
                elif kind == "parameter":
                    whole = fragments.safe_get_full_fp32_param(parameter)
                else:
                    whole = fragments.safe_get_full_optimizer_state(parameter, kind)
                shards += self._shard(name, kind, whole.view(self._shapes[name]))
        return shards

    @torch.no_grad()
    def load(self, read: Read, *, updates: int) -> None:
        """Set the parameters used for computation, their fp32 copies, and the optimizer's state."""
        fragments, zero = self._deepspeed.utils, self._deepspeed.zero
        if self._kinds:
            for flat in self._engine.optimizer.fp32_partitioned_groups_flat:
                # As the first step would make it. The fused AdamW expects the step on the device.
                step = {"step": torch.tensor(float(updates), device=flat.device)}
                self._base.state[flat] = {k: torch.zeros_like(flat) for k in self._kinds} | step
        for name, parameter in self._parameters.items():
            rows = range(num_rows(self._shapes[name]))
            whole = read(name, "parameter", rows).view(self._shapes[name])
            with zero.GatheredParameters([parameter], modifier_rank=0):
                if self._device.rank == 0:
                    parameter.copy_(whole)
            if name in self._frozen:
                continue
            fragments.safe_set_local_fp32_param(parameter, self._own_part(parameter, whole))
            for kind in self._kinds:
                part = self._own_part(parameter, read(name, kind, rows))
                fragments.safe_set_local_optimizer_state(parameter, part, kind)

    def _own_part(self, parameter: Any, whole: Tensor) -> Tensor:
        return own_part([whole], parameter.ds_tensor.numel(), self._device.rank)


def _open_deepspeed(accelerator: str) -> Any:
    # DeepSpeed takes a GPU if there is one, even if the plan says cpu.
    os.environ["DS_ACCELERATOR"] = accelerator
    try:
        import deepspeed
    except ImportError:
        raise TrainError(
            "strategy deepspeed: deepspeed is missing: run pip install '.[deepspeed]' in a clone "
            "of trnslurm, or use the preset fsdp"
        ) from None
    # On CPUs DeepSpeed would compile its own collectives, which takes a C++ compiler and a minute.
    # They use shared memory, even between workers that play different nodes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Takes over the existing process group, in which zero.Init finds the workers.
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    return deepspeed
