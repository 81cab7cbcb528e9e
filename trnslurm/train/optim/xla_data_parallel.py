"""Plain data parallelism on XLA devices: gradients are reduced once per optimizer step."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from trnslurm.train.devices.scalars import rate_tensor, scalar_tensor
from trnslurm.train.optim.data_parallel import DataParallel

# AWS's advice for BERT on several instances (torch-neuron-envvars.rst). Gradients of BERT-large in
# fp32 are 1.3 GB: one all-reduce of all would need as much again for its result.
BUCKET_MB = 512


class XlaDataParallel(DataParallel):
    """DataParallel by torch_xla's means, and so that no later step has a graph of its own."""

    _tensor_lr = False

    def _make_base(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> torch.optim.Optimizer:
        self._tensor_lr = cls is not torch.optim.SGD
        if cls is torch.optim.AdamW:
            # As Python numbers, lr = 0 and a bias correction that rounds to 1 (k = 16628 at
            # beta2 = 0.999) are compiled in: a new graph in the middle of a run.
            options = {**options, "capturable": True}
        return cls(groups, lr=self._rate(0.0), foreach=False, **options)

    def _allocate(self, dtype: torch.dtype) -> tuple[list[Tensor], dict[nn.Parameter, Tensor]]:
        # Not in one piece: XLA has no views, and joins tensors of a collective by itself.
        zeros = {each: torch.zeros_like(each, dtype=dtype) for each in self._parameters}
        return list(zeros.values()), zeros

    def begin_last_unit(self) -> None:
        """Do nothing: the order of what happens on the device is the compiler's."""

    def _reduce(self) -> None:
        # torch_xla itself reads the variable where it averages, in xm.reduce_gradients, alone.
        bucket_mb = int(os.environ.get("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", BUCKET_MB))
        xm.all_reduce_bucketized_gradients(
            self._gradients, scale=1.0, groups=None, pin_layout=False, bucket_cap_mb=bucket_mb
        )

    def _rate(self, lr: float) -> Tensor | float:
        # SGD reads a tensor back to the host, so it gets the number.
        return rate_tensor(self._device, lr) if self._tensor_lr else lr

    def _count(self, updates: int, parameter: Tensor) -> Tensor:
        return scalar_tensor(self._device, updates)

    def _own_part(self, tensor: Tensor, rows: range) -> tuple[Tensor, int]:
        # Cut on the host: here it would take a graph.
        return tensor, rows.start
