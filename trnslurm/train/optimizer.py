"""One optimizer step over all workers: ZeRO-1 on XLA devices, plain data parallelism elsewhere.

Both expect gradients that add up, over workers and units, to the gradient of the global batch; both
clip by the global norm and return that norm as it was before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trnslurm.train.device import Device
from trnslurm.train.errors import TrainError

OPTIMIZERS = ("adamw", "sgd")

# neuronx-distributed's default; it notes NaN at step 3 for reduce-scatter buckets over 140 MB.
REDUCE_SCATTER_BUCKET_MB = 130


class GlobalOptimizer(ABC):
    """A step that all workers take together."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        # Made once and zeroed in place: a gradient that appears in the first backward pass would
        # make its graph, and that of the optimizer, differ from the next.
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def zero_grad(self) -> None:
        """Set the gradients to zero in place."""
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

    @abstractmethod
    def step(self, lr: float) -> Tensor:
        """Reduce and clip the gradients, update the parameters, give the norm before clipping."""


class Zero1(GlobalOptimizer):
    """torch_xla's ZeroRedundancyOptimizer: every worker keeps the optimizer state of its shard."""

    def __init__(
        self,
        device: Device,
        groups: list[dict[str, Any]],
        cls: Callable[..., torch.optim.Optimizer],
        options: dict[str, Any],
        max_norm: float,
    ) -> None:
        from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        super().__init__(groups)
        self._device = device
        self._tensor_lr = cls is torch.optim.AdamW
        self._everyone = [list(range(device.world))]
        if self._tensor_lr:
            # As Python numbers, lr = 0 and a bias correction that rounds to 1 (k = 16628 at
            # beta2 = 0.999) are compiled in: a new graph in the middle of a run.
            options = {**options, "capturable": True}
        zero: Any = ZeroRedundancyOptimizer  # its own annotations are too narrow
        self._zero = zero(
            groups,
            cls,
            optimizer_dtype=torch.float32,
            grad_clipping=True,
            max_norm=max_norm,
            sharding_groups=self._everyone,
            pin_layout=False,
            bucket_cap_mb_reduce_scatter=REDUCE_SCATTER_BUCKET_MB,
            bucket_cap_mb_all_gather=max(1, REDUCE_SCATTER_BUCKET_MB // device.world),
            save_master_weights=True,
            higher_cc_precision=True,
            lr=self._rate(0.0),
            foreach=False,
            **options,
        )

    def step(self, lr: float) -> Tensor:
        """Take one step; gradients are summed, so ZeRO's division by the world is undone."""
        rate = self._rate(lr)
        for group in self._zero.param_groups:
            group["lr"] = rate
        scheme = {
            "scale_factor": self._device.world,
            "sharding_group": self._everyone,
            "group_size": self._device.world,
        }
        self._zero.step(sharding_scheme=[scheme])
        norm: Tensor = self._zero.grad_norm
        return norm

    def _rate(self, lr: float) -> Tensor | float:
        # A vector of one, because torch_xla compiles 0-dimensional 0 and 1 in. SGD reads a tensor
        # back to the host, so it gets the number.
        return self._device.put(torch.tensor([lr])) if self._tensor_lr else lr


class DataParallel(GlobalOptimizer):
    """Gradients summed with all-reduce, the whole optimizer on every worker."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        cls: Callable[..., torch.optim.Optimizer],
        options: dict[str, Any],
        max_norm: float,
    ) -> None:
        super().__init__(groups)
        self._max_norm = max_norm
        self._optimizer = cls(groups, lr=0.0, **options)

    def step(self, lr: float) -> Tensor:
        """Take one step."""
        for parameter in self._parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm


def make_optimizer(
    name: str,
    device: Device,
    parameters: Iterable[nn.Parameter],
    *,
    weight_decay: float,
    max_norm: float,
    **adam: Any,
) -> GlobalOptimizer:
    """Make the optimizer for a device; betas and eps (adam) are for adamw alone.

    Matrices decay; biases and layer norms, which are vectors, do not.
    """
    if name not in OPTIMIZERS:
        raise TrainError(f"train.optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {}
    if name == "adamw":
        cls, options = torch.optim.AdamW, adam
    if device.torch_device.type == "xla":
        return Zero1(device, groups, cls, options, max_norm)
    return DataParallel(groups, cls, options, max_norm)
