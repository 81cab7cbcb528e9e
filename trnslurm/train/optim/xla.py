"""Optimizers on XLA devices: plain data parallelism, and ZeRO-1 through torch_xla's optimizer."""

import os
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from trnslurm.train.checkpoint.state import Read, own_rows
from trnslurm.train.devices.device import Device
from trnslurm.train.devices.xla import REDUCE_SCATTER_BUCKET_MB, rate_for, scalar_tensor
from trnslurm.train.optim.data_parallel import DataParallel
from trnslurm.train.optim.optimizer import ADAMS, GlobalOptimizer, OptimizerSpec, update

# As Python numbers, lr = 0 and a bias correction that rounds to 1 (k = 16628 at beta2 = 0.999) are
# compiled in: a new graph in the middle of a run.
CAPTURABLE = {"capturable": True}


class XlaZero1(GlobalOptimizer):
    """torch_xla's ZeroRedundancyOptimizer: every worker keeps the optimizer state of its shard."""

    def __init__(self, device: Device, spec: OptimizerSpec) -> None:
        assert spec.precision != "fp32_state"
        super().__init__(device, spec)
        self._everyone = [list(range(device.world))]
        options = {**spec.options, **(CAPTURABLE if spec.cls in ADAMS else {})}
        # It reduces, clips and updates in one type.
        first = self._parameters[0].dtype
        dtype = first if spec.precision == "as_model" else torch.float32
        zero: Any = ZeroRedundancyOptimizer  # its own annotations are too narrow
        self._zero = zero(
            spec.groups,
            spec.cls,
            optimizer_dtype=dtype,
            grad_clipping=True,
            max_norm=spec.max_norm,
            sharding_groups=self._everyone,
            pin_layout=False,
            bucket_cap_mb_reduce_scatter=REDUCE_SCATTER_BUCKET_MB,
            bucket_cap_mb_all_gather=max(1, REDUCE_SCATTER_BUCKET_MB // device.world),
            save_master_weights=True,
            higher_cc_precision=True,
            lr=rate_for(device, 0.0, self._kinds),
            foreach=False,
            **options,
        )
        self._base = self._zero.base_optimizer

    def step(self, lr: float) -> Tensor:
        """Take one step; undo ZeRO's division by the world size (data/units.py explains why)."""
        rate = rate_for(self._device, lr, self._kinds)
        for group in self._zero.param_groups:
            group["lr"] = rate
        scheme = {
            "scale_factor": self._device.world,
            "sharding_group": self._everyone,
            "group_size": self._device.world,
        }
        self._zero.step(sharding_scheme=[scheme])
        torch._foreach_zero_(self._gradients)
        norm: Tensor = self._zero.grad_norm
        return norm

    def load(self, read: Read, *, updates: int) -> None:
        """Transfer every tensor to the device without any graph.

        The first step then has the graph of any later step, because the state already exists.
        Existing tensors stay the same, and the state is created in the order in which a first step
        creates it, because torch_xla orders a graph's results by their age.
        """
        self._load_frozen(read)
        for name, parameter, holder in self._triples():
            rows = own_rows(parameter.shape, self._device.rank, self._device.world)
            whole = read(name, "parameter", range(parameter.shape[0]))
            # From the host, copy_ is a transfer if the types are the same.
            parameter.data.copy_(whole.to(parameter.dtype))
            holder.data.copy_(_padded(whole[rows.start : rows.stop], holder))
            if self._kinds:
                self._base.state[holder]["step"] = scalar_tensor(self._device, updates)
            for kind in self._kinds:
                padded = _padded(read(name, kind, rows), holder)
                self._base.state[holder][kind] = self._device.put(padded)

    def _holders(self) -> list[Tensor]:
        return [shard for group in self._base.param_groups for shard in group["params"]]

    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        # Padding is cut off on the host: here it would take a graph.
        return tensor, 0


def _padded(rows: Tensor, holder: Tensor) -> Tensor:
    padding = rows.new_zeros(len(holder) - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding]).to(holder.dtype)


# AWS's advice for BERT on several instances (torch-neuron-envvars.rst). Gradients of BERT-large in
# fp32 are 1.3 GB: one all-reduce of all would need as much again for its result.
BUCKET_MB = 512


class XlaDataParallel(DataParallel):
    """DataParallel on torch_xla, with the same graph in every step."""

    def _make_base(self, spec: OptimizerSpec) -> torch.optim.Optimizer:
        rate = rate_for(self._device, 0.0, self._kinds)
        return spec.make(rate, adam=CAPTURABLE, foreach=False)

    def _allocate(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        # Separate tensors: XLA has no views, and joins the tensors of a collective by itself.
        zeros = {each: torch.zeros_like(each, dtype=dtype) for each in self._parameters}
        return list(zeros.values()), zeros

    def _reduce(self) -> None:
        # torch_xla reads the variable in xm.reduce_gradients only, which averages.
        bucket_mb = int(os.environ.get("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", BUCKET_MB))
        xm.all_reduce_bucketized_gradients(
            self._gradients, scale=1.0, groups=None, pin_layout=False, bucket_cap_mb=bucket_mb
        )

    def _update(self, lr: float) -> None:
        update(self._base, rate_for(self._device, lr, self._kinds))

    def _count(self, updates: int, parameter: Tensor) -> Tensor:
        return scalar_tensor(self._device, updates)
